"""ONNX export: the graph says what torch says, for every family that is claimed; what cannot be exported is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from tests.berts import write_tables
from tests.calling import call, refused
from tests.models.making import average, batch_for

import orthomerge as om
from orthomerge.core.errors import NumericalError, OutputError, RecipeError
from orthomerge.models import onnx as onnx_export
from orthomerge.models.onnx import _INPUTS


def answers(folder: Path, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What onnxruntime says, by output."""
    onnx.checker.check_model(folder / "model.onnx")
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    assert {item.name for item in session.get_inputs()} == set(batch)
    assert all(item.shape[0] == "batch" for item in (*session.get_inputs(), *session.get_outputs()))
    outputs = session.run(None, {name: tensor.numpy() for name, tensor in batch.items()})
    names = [item.name for item in session.get_outputs()]
    return {name: torch.from_numpy(np.asarray(each)) for name, each in zip(names, outputs, strict=True)}


def inputs_of(model: om.Model) -> dict[str, torch.Tensor]:
    """A batch of other size and length than those of the export."""
    batch = batch_for(model.family, SimpleNamespace(**model.config))
    batch["token_type_ids"] = torch.zeros_like(next(iter(batch.values()))).long()
    return {name: batch[name] for name in _INPUTS[model.family.name]}


@pytest.mark.parametrize("name", sorted({*_INPUTS} - {"xlm_roberta", "camembert"}))  # these are RoBERTa
def test_every_family_that_is_claimed(name: str, tmp_path: Path) -> None:
    model = average(name, tmp_path)
    about: Any = om.export(model, tmp_path / "onnx", task="two", format="onnx")
    batch = inputs_of(model)
    with torch.no_grad():
        meant = model.module("cpu")(**batch)["two"]
    torch.testing.assert_close(answers(tmp_path / "onnx", batch)["logits"], meant, rtol=0, atol=1e-4)
    assert about["gap"]["two"] <= 1e-4
    config = json.loads((tmp_path / "onnx/config.json").read_text())
    assert config["id2label"] == dict(zip("01234", model.labels["two"], strict=True))


def test_all_heads_in_one_graph(merged_berts: Path, tmp_path: Path) -> None:
    text = call("export", merged_berts, "--all-heads", "--format", "onnx", "--out", tmp_path / "onnx").stdout
    assert "outputs two, three, five; logits are within" in text
    model = om.load(merged_berts)
    batch = inputs_of(model)
    with torch.no_grad():
        meant = model.module("cpu")(**batch)
    logits_of = answers(tmp_path / "onnx", batch)
    assert list(logits_of) == ["two", "three", "five"]
    for task, logits in logits_of.items():
        torch.testing.assert_close(logits, meant[task], rtol=0, atol=1e-4)
    about = json.loads((tmp_path / "onnx/orthomerge-export.json").read_text())
    assert about["labels"]["three"] == ["three-0", "three-1", "three-2"]
    assert (tmp_path / "onnx/vocab.txt").is_file()
    assert not (tmp_path / "onnx/config.json").exists()
    words = ("--task", "two", "--format", "onnx", "--out", tmp_path / "onnx")
    assert "exists already" in refused("export", merged_berts, *words, code=5)


def test_what_the_graph_gets_wrong_is_not_kept(
    merged_berts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_export, "_write", lambda graph, batch, outputs, path: path.write_bytes(b"no graph"))
    with pytest.raises(OutputError, match="onnxruntime cannot run the exported graph"):
        om.export(merged_berts, tmp_path / "onnx", task="two", format="onnx")
    assert not (tmp_path / "onnx").exists()

    session = Mock()
    session.run.side_effect = lambda names, batch: [np.zeros((len(batch["input_ids"]), 2), np.float32)]
    monkeypatch.setattr(onnxruntime, "InferenceSession", Mock(return_value=session))
    with pytest.raises(NumericalError, match=r"the logits of 'two' differ by .* the graph was not kept"):
        om.export(merged_berts, tmp_path / "onnx", task="two", format="onnx")
    assert not (tmp_path / "onnx").exists()


def test_refused(merged_berts: Path, berts: Path, tmp_path: Path) -> None:
    to = tmp_path / "onnx"
    with pytest.raises(RecipeError, match="did you mean 'two'"):
        om.export(merged_berts, to, task="tow", format="onnx")
    for words, message in (
        (("--task", "two", "--format", "onx"), "did you mean 'onnx'"),
        (("--task", "two", "--all-heads", "--format", "onnx"), "not both"),
        (("--all-heads",), "give --task, or --format onnx with --all-heads"),
        ((), "give --task TASK, or --all-heads"),
    ):
        assert message in refused("export", merged_berts, *words, "--out", to, code=2)
    tables = write_tables(tmp_path)
    options: dict[str, Any] = {"rank": 2, "steps": 2}
    aligned = om.align(merged_berts, {"two": tables / "two.csv"}, aligner="surgery", options=options)
    with pytest.raises(RecipeError, match="the classifier of 'two' has a module before the head"):
        om.export(aligned, to, task="two", format="onnx")
    with pytest.raises(RecipeError, match=r"ONNX export supports bert, .* of family 'dinov2'; use `orthomerge export`"):
        om.export(average("dinov2", tmp_path / "dinov2"), to, task="two", format="onnx")
