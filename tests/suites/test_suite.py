"""The table of suites, what a built suite merges and scores, and small builds of `text8` and `vision8`."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.analysis.making import PROCESSOR, Toy

from orthomerge import Model, evaluate
from orthomerge.core.device import fixed_threads
from orthomerge.core.errors import CheckpointError, OutputError, RecipeError
from orthomerge.suites import eights
from orthomerge.suites.digits import digit_tasks
from orthomerge.suites.suite import Suite, make_experts
from orthomerge.suites.table import SUITES, build_suite, suite_root
from orthomerge.tuning.settings import Tuning


@pytest.fixture
def suite(toy: Toy, tmp_path: Path) -> Suite:
    (tmp_path / "base").symlink_to(toy.folder / "base")
    paths = {task: toy.folder / task for task in toy.tasks}
    return Suite("toy", tmp_path, toy.tasks, PROCESSOR, paths, mtl=paths)


def tensors(model: Model) -> dict[str, torch.Tensor]:
    """The whole encoder, flat."""
    blocks: dict[str, list[torch.Tensor]] = {}
    for key, block in model.weights.blocks():
        blocks.setdefault(key, []).append(block.reshape(-1))
    return {key: torch.cat(parts) for key, parts in blocks.items()}


def test_the_table() -> None:
    for row in SUITES.values():
        module, _, function = row.maker.partition(":")
        assert callable(getattr(import_module(f"orthomerge.suites.{module}"), function))
        assert len(set(row.tasks)) == len(row.tasks) >= 5
    assert SUITES["digits"].tasks == tuple(digit_tasks())


@pytest.mark.parametrize(
    ("name", "data", "error", "message"),
    [
        ("digit", None, RecipeError, r"unknown suite 'digit'; did you mean 'digits'\?"),
        ("text8", None, CheckpointError, r"tasks, such as ag_news; give it with --data"),
        ("text8", ".", CheckpointError, "has no data of 'ag_news', 'yelp5', 'dbpedia14' and 4 more; give"),
        ("vision8", ".", CheckpointError, "has no file or folder named after a task"),
    ],
)
def test_refused(name: str, data: str | None, error: type[Exception], message: str, tmp_path: Path) -> None:
    (tmp_path / "subj.csv").touch()
    with pytest.raises(error, match=message):
        build_suite(name, folder=tmp_path / "suite", data=tmp_path / data if data else None)
    assert not (tmp_path / "suite").exists()


def test_references(suite: Suite, toy: Toy) -> None:
    references = suite.references()
    assert [name for name, subject in references.items() if name == subject.name] == ["base", "expert", "mtl"]
    assert len(references) == 3
    own, start = tensors(toy.experts.teacher("bright")), tensors(toy.experts.base)
    for name, expected in (("base", start), ("expert", own), ("mtl", own)):
        weights = tensors(references[name].models["bright"])
        assert all(tensor.equal(expected[key]) for key, tensor in weights.items())
    assert references["base"].models["bright"].tasks == tuple(toy.tasks)
    assert "mtl" not in replace(suite, mtl={}).references()


def test_a_merge_is_scored_and_nothing_but_features_is_written(suite: Suite, toy: Toy) -> None:
    model = suite.merged("task_arithmetic", {"scale": 0.5})
    start, (one, other) = tensors(toy.experts.base), map(tensors, toy.experts.sources.values())
    for key, tensor in tensors(model).items():
        expected = start[key] + 0.5 * (one[key] - start[key] + other[key] - start[key])
        torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=0)
    encoding = suite.encoding("cpu", batch=8)
    subjects: list[Any] = [*suite.references().values(), model]
    scores = evaluate(subjects, suite.tasks, experts=suite.experts, suite="toy", encoding=encoding)
    assert {record.method for record in scores.records} == {"base", "expert", "mtl", "task_arithmetic"}
    assert {record.suite for record in scores.records} == {"toy"}
    assert sorted(path.name for path in suite.folder.iterdir()) == ["base", "features"]
    assert suite.experts is suite.experts
    for name, message in (("tiess", "did you mean 'ties'"), ("moma", "is fitted to inputs")):
        with pytest.raises(RecipeError, match=message):
            suite.merged(name)


def test_options_say_how_experts_are_opened(suite: Suite, toy: Toy, tmp_path: Path) -> None:
    for name in ("base", *toy.tasks):
        shutil.copytree(toy.folder / name, tmp_path / "own" / name)
    paths = {task: tmp_path / "own" / task for task in toy.tasks}
    own = replace(suite, folder=tmp_path / "own", paths=paths, options={"pooling": "mean"})
    assert {head.pooling for head in own.experts.heads.values()} == {"mean"}
    (tmp_path / "own" / "where" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="where"):
        replace(own).references()


def test_where_suites_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path))
    assert suite_root() == tmp_path / "suites"
    monkeypatch.delenv("ORTHOMERGE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert suite_root() == tmp_path / ".cache" / "orthomerge" / "suites"


def test_experts_that_exist_are_kept_and_errors_come_through(suite: Suite, tmp_path: Path) -> None:
    lines: list[str] = []
    settings = Tuning(mode="tau_jp", steps=1, batch=16, device="cpu")  # which uses the other tasks' inputs
    root = tmp_path / "made"
    (root / "where").mkdir(parents=True)
    (root / "where" / "diary.txt").write_text("dear diary")
    with fixed_threads(1):
        with pytest.raises(OutputError, match="where exists already"):
            make_experts(suite, settings, root=root, say=lines.append)
        before = (root / "bright" / "model.safetensors").stat().st_mtime_ns
        shutil.rmtree(root / "where")
        made = make_experts(suite, settings, root=root, say=lines.append)
    assert [line.partition(":")[0] for line in lines] == ["bright", "where"]
    assert all((path / "config.json").is_file() for path in made.values())
    assert (root / "bright" / "model.safetensors").stat().st_mtime_ns == before


SPLITS = {"train": 20, "test": 8}


@pytest.fixture
def one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in list(vars(eights).items()):
        if isinstance(value, Tuning):
            monkeypatch.setattr(eights, name, replace(value, steps=1))
    monkeypatch.setattr(eights, "SHAPE", {**eights.SHAPE, "hidden_size": 12, "num_hidden_layers": 1})


def tuning(folder: Path) -> Any:
    """The settings that an expert was trained with."""
    return json.loads((folder / "config.json").read_text())["orthomerge"]["tuning"]


@pytest.mark.usefixtures("one_step")
def test_vision8(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for place, name in enumerate(SUITES["vision8"].tasks):
        shape = (28, 28) if place % 2 else (32, 32, 3)
        arrays = {f"x_{split}": random.integers(0, 256, (n, *shape), dtype=np.uint8) for split, n in SPLITS.items()}
        labels = {f"y_{split}": np.arange(n) % 2 for split, n in SPLITS.items()}
        np.savez(tmp_path / f"{name}.npz", **arrays, **labels, label_names=np.array(["a", "b"]))  # type: ignore[arg-type]
    lines: list[str] = []
    suite = build_suite("vision8", folder=tmp_path / "suite", data=tmp_path, device="cpu", say=lines.append)
    assert len(lines) == 2 + 8 + 1
    assert json.loads((suite.base / "config.json").read_text())["hidden_size"] == 12
    assert tuning(suite.folder / "experts" / "gtsrb")["batch"] == eights.VISION.batch
    assert tuning(suite.mtl["gtsrb"])["batch"] == eights.VISION_JOINT.batch
    assert tuning(suite.mtl["gtsrb"])["augment"] == "shift"


@pytest.mark.usefixtures("one_step")
def test_text8(berts: Path, tmp_path: Path) -> None:
    for name in SUITES["text8"].tasks:
        texts = [(f"{name} a bad film", 0, "a"), (f"{name} a good film", 1, "b")]
        rows = [(split, *pair) for split, count in SPLITS.items() for pair in texts * (count // 2)]
        keyed = (dict(zip(("split", "text", "label", "label_name"), row, strict=True)) for row in rows)
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in keyed))
    options: dict[str, Any] = {"folder": tmp_path / "suite", "data": tmp_path, "base": str(berts / "base")}
    started = eights.start_text(**options, say=lambda text: None)
    assert sorted(path.name for path in started.folder.iterdir()) == ["base"]
    suite = build_suite("text8", **options, device="cpu", say=lambda text: None)
    assert suite.tasks.keys() == started.tasks.keys() == suite.paths.keys() == suite.mtl.keys()
    assert tuning(suite.mtl["subj"])["batch"] == 2 * tuning(suite.folder / "experts" / "subj")["batch"]
