"""Aligned outputs: as large as before, equal to what was fitted, the same for the same inputs, whole or not there."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.aligning import COUNTS, HEADS, contents, merge_berts, stock, write_tables

import orthomerge
from orthomerge.alignment.aligner import Alignment
from orthomerge.alignment.aligners import ALIGNERS, aligner_class
from orthomerge.alignment.linear_maps import Ridge
from orthomerge.alignment.problem import Problem
from orthomerge.alignment.rigid import choose_rigid
from orthomerge.checkpoints.files import RawFile
from orthomerge.classifiers import load_head
from orthomerge.data.processing import load_processor
from orthomerge.data.reading import read_inputs, read_task
from orthomerge.features.features import FeaturePair, Features
from orthomerge.heads import Head
from orthomerge.manifest import access_class, read_manifest
from orthomerge.merged import load
from orthomerge.strict import schema

TASKS = ("two", "three")
CHEAP = {"steps": 5, "epochs": 2}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path_factory.getbasetemp() / "aligning-cache"))


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tables(tmp_path_factory.mktemp("tables"))


@pytest.fixture(scope="module")
def out(berts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge_berts(berts, tmp_path_factory.mktemp("merged") / "out")


@pytest.fixture
def given(berts: Path, tables: Path) -> dict[str, Any]:
    """Data and experts of two of the three tasks."""
    return {
        "data": {task: tables / f"{task}.csv" for task in TASKS},
        "experts": {task: berts / task for task in TASKS},
        "aligner": "ridge",
        "device": "cpu",
    }


def pair_of(out: Path, expert: Path, table: Path, task: str) -> FeaturePair:
    """What both encoders make of the training inputs, by hand."""
    examples = read_task(table)["train"]
    processor = load_processor(out / "encoder", modality="text")
    batch = processor(examples.inputs)
    with torch.no_grad():
        merged = load(out).features(batch)
        expert_values = stock(expert).bert(**batch).pooler_output
    return FeaturePair(Features(merged, task, "train"), Features(expert_values, task, "train"))


@pytest.mark.parametrize("aligner", [name for name, row in ALIGNERS.items() if not row.extra])
def test_nothing_is_added(out: Path, given: dict[str, Any], tmp_path: Path, aligner: str) -> None:
    known = schema(aligner_class(ALIGNERS[aligner]))
    options = {name: value for name, value in CHEAP.items() if name in known}
    result = orthomerge.align(out, to=tmp_path / "to", **{**given, "aligner": aligner, "options": options})
    before, after = contents(out), contents(tmp_path / "to")
    assert before.keys() == after.keys()
    assert {name: len(data) for name, data in before.items() if not name.endswith((".md", "merge.json"))} == {
        name: len(data) for name, data in after.items() if not name.endswith((".md", "merge.json"))
    }
    changed = {name for name in before if before[name] != after[name]}
    heads = {f"heads/{task}/head.safetensors" for task in TASKS}
    assert changed <= {*heads, "README.md", "orthomerge.json"}
    assert orthomerge.verify(tmp_path / "to") == []
    assert result.out == tmp_path / "to"
    assert f"aligned by `{aligner}`" in after["README.md"].decode()
    for task in HEADS:
        old, new = (load_head(folder / "heads" / task).tensors() for folder in (out, tmp_path / "to"))
        assert {key: t.shape for key, t in old.items()} == {key: t.shape for key, t in new.items()}


def test_the_manifest_says_what_was_done(out: Path, given: dict[str, Any], tmp_path: Path) -> None:
    manifest = orthomerge.align(out, to=tmp_path / "to", limit=40, seed=3, **given).manifest
    assert manifest == read_manifest(tmp_path / "to")
    merged = read_manifest(out)
    rest = {key: value for key, value in manifest.items() if key not in ("alignment", "files", "notes")}
    assert rest == {key: value for key, value in merged.items() if key not in ("files", "notes")}
    about = manifest["alignment"]
    assert about["merge"] == RawFile(out / "orthomerge.json").digest()
    said = {key: about[key] for key in ("aligner", "options", "seed", "split", "limit", "access")}
    assert said == {
        "aligner": "ridge",
        "options": {"strength": "auto"},
        "seed": 3,
        "split": "train",
        "limit": 40,
        "access": "inductive",
    }
    assert list(about["tasks"]) == list(TASKS)
    for task, found in about["tasks"].items():
        used = read_inputs(given["data"][task], name=task, labels=load_head(out / "heads" / task).labels,
                           split="train", limit=40, seed=3)["train"]  # fmt: skip
        assert (found["inputs"], found["data"]) == (40, f"sha256:{used.digest()}")
        assert found["extra"] == {"parameters": 0, "bytes": 0}
        assert found["expert"] == merged["inputs"]["experts"][task]
    assert manifest["notes"] == ["no data of 'five' was given to align it with; its head is as it was merged"]


def test_infinity_is_a_word_in_the_manifest(out: Path, given: dict[str, Any], tmp_path: Path) -> None:
    manifest = orthomerge.align(out, to=tmp_path / "to", options={"strength": float("inf")}, **given).manifest
    assert manifest["alignment"]["options"] == {"strength": "inf"}
    assert manifest["alignment"]["tasks"]["two"]["facts"] == {"strength": "inf"}
    assert json.loads((tmp_path / "to/orthomerge.json").read_text(), parse_constant=pytest.fail)
    # An infinite prior changes nothing.
    assert contents(tmp_path / "to/heads") == contents(out / "heads")


def test_exported_logits_are_those_of_the_unfolded_map(
    out: Path, berts: Path, given: dict[str, Any], tables: Path, tmp_path: Path
) -> None:
    orthomerge.align(out, to=tmp_path / "to", **{**given, "aligner": "orthogonal"})
    batch = load_processor(out / "encoder", modality="text")(read_task(tables / "two.csv")["test"].inputs)
    for task in TASKS:
        orthomerge.export(tmp_path / "to", task, tmp_path / task)
        head = load_head(out / "heads" / task)
        problem = Problem.of(pair_of(out, berts / task, tables / f"{task}.csv", task), head)
        found = choose_rigid(problem, kappa="auto", bias=True)
        assert found.kappa < float("inf")
        with torch.no_grad():
            features = load(out).features(batch).double()
            unfolded = head.with_tensors({key: t.double() for key, t in head.tensors().items()})(
                features @ found.A.T + (0 if found.shift is None else found.shift)
            )
            logits = stock(tmp_path / task)(**batch).logits.double()
        assert (logits - unfolded).abs().max() <= 1e-5 * unfolded.abs().max()


def test_the_same_inputs_give_the_same_bytes_whatever_their_labels(
    out: Path, given: dict[str, Any], tables: Path, tmp_path: Path
) -> None:
    tasks = {task: read_task(tables / f"{task}.csv") for task in TASKS}
    bare = {
        name: replace(task, splits={split: part.unlabelled() for split, part in task.splits.items()})
        for name, task in tasks.items()
    }
    options = {**given, "aligner": "aligned-c", "options": {"epochs": 2}, "limit": 50}
    for name, data in {"files": given["data"], "tasks": tasks, "bare": bare}.items():
        orthomerge.align(out, to=tmp_path / name, **{**options, "data": data})
    first = contents(tmp_path / "files")
    assert contents(tmp_path / "tasks") == first
    assert contents(tmp_path / "bare") == first
    orthomerge.align(out, to=tmp_path / "other", **{**options, "seed": 1})
    assert contents(tmp_path / "other")["heads/two/head.safetensors"] != first["heads/two/head.safetensors"]


def test_an_aligner_gets_no_labels(
    out: Path, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[FeaturePair] = []

    def fit(self: Ridge, pair: FeaturePair, head: Head) -> Alignment:
        seen.append(pair)
        return Alignment(head)

    monkeypatch.setattr(Ridge, "fit", fit)
    orthomerge.align(out, to=tmp_path / "to", **given)
    assert [pair.merged.task for pair in seen] == list(TASKS)
    assert all(part.labels is None for pair in seen for part in (pair.merged, pair.expert))
    assert all(len(pair.merged) == COUNTS["train"] for pair in seen)
    assert not torch.equal(seen[0].merged.values, seen[0].expert.values)


def test_a_table_needs_no_labels(out: Path, given: dict[str, Any], tables: Path, tmp_path: Path) -> None:
    with (tables / "two.csv").open() as file, (tmp_path / "bare.csv").open("w", newline="") as bare:
        writer = csv.writer(bare)
        writer.writerows((row[0], row[2]) for row in csv.reader(file))
    orthomerge.align(out, to=tmp_path / "with", **given)
    orthomerge.align(out, to=tmp_path / "without", **{**given, "data": {**given["data"], "two": tmp_path / "bare.csv"}})
    assert contents(tmp_path / "with") == contents(tmp_path / "without")


def test_the_test_split_must_be_asked_for_and_is_said(out: Path, given: dict[str, Any], tmp_path: Path) -> None:
    result = orthomerge.align(out, to=tmp_path / "to", split="test", **given)
    assert access_class(result.manifest) == "transductive"
    assert result.manifest["alignment"]["tasks"]["two"]["inputs"] == COUNTS["test"]
    assert "is transductive" in (tmp_path / "to/README.md").read_text()
    assert access_class(read_manifest(out)) == "data-free"


def test_a_head_in_half_precision_stays_one(berts: Path, given: dict[str, Any], tables: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    half = Path(shutil.copytree(berts / "two", tmp_path / "two"))
    tensors = load_file(half / "model.safetensors")
    heads = {key: t.bfloat16() if key.startswith("classifier") else t for key, t in tensors.items()}
    save_file(heads, half / "model.safetensors", metadata={"format": "pt"})
    out = orthomerge.merge(orthomerge.Recipe({"two": str(half)}, base=str(berts / "base")), out=tmp_path / "out").out
    options = {**given, "aligner": "aligned-c", "options": {"epochs": 2}, "experts": {"two": half}}
    result = orthomerge.align(out, to=tmp_path / "to", **{**options, "data": {"two": tables / "two.csv"}})
    assert {t.dtype for t in load_head(tmp_path / "to/heads/two").tensors().values()} == {torch.bfloat16}
    assert 0 < result.manifest["alignment"]["tasks"]["two"]["facts"]["rounding"] < 1
