"""A built suite: what is evaluated is merged in memory, and called by its name."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.analysis.making import PROCESSOR, Toy, make_toy

from orthomerge.api.evaluate import evaluate
from orthomerge.core.errors import CheckpointError, RecipeError
from orthomerge.models.model import Model
from orthomerge.suites.suite import Suite, suite_root


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def suite(toy: Toy, tmp_path: Path) -> Suite:
    (tmp_path / "base").symlink_to(toy.folder / "base")
    paths = {task: toy.folder / task for task in toy.tasks}
    return Suite("toy", tmp_path, toy.tasks, PROCESSOR, paths, mtl=paths)


def tensors(model: Model) -> dict[str, torch.Tensor]:
    """The whole encoder, flat."""
    runs: dict[str, list[torch.Tensor]] = {}
    for key, block in model.weights.blocks():
        runs.setdefault(key, []).append(block.reshape(-1))
    return {key: torch.cat(blocks) for key, blocks in runs.items()}


def test_references(suite: Suite, toy: Toy) -> None:
    references = suite.references()
    assert list(references) == ["base", "expert", "mtl"]
    for name, subject in references.items():
        assert (subject.name, list(subject.models), subject.access) == (name, list(toy.tasks), "data-free")
    base, expert, mtl = (references[name].models["bright"] for name in ("base", "expert", "mtl"))
    assert (base.tasks, expert.tasks, mtl.tasks) == (tuple(toy.tasks), ("bright",), ("bright",))
    own, start = tensors(toy.experts.teacher("bright")), tensors(toy.experts.base)
    assert all(tensor.equal(own[key]) for key, tensor in tensors(expert).items())
    assert all(tensor.equal(own[key]) for key, tensor in tensors(mtl).items())
    assert all(tensor.equal(start[key]) for key, tensor in tensors(base).items())
    assert base.heads["bright"].labels == expert.heads["bright"].labels
    assert "mtl" not in replace(suite, mtl={}).references()


def test_a_merge(suite: Suite, toy: Toy) -> None:
    model = suite.merged("task_arithmetic", {"scale": 0.5})
    assert (model.title, model.tasks, model.origin.access) == ("task_arithmetic", tuple(toy.tasks), "data-free")
    start, (one, other) = tensors(toy.experts.base), map(tensors, toy.experts.sources.values())
    for key, tensor in tensors(model).items():
        expected = start[key] + 0.5 * (one[key] - start[key] + other[key] - start[key])
        torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=0)
    assert sorted(path.name for path in suite.folder.iterdir()) == ["base"]  # nothing is written
    assert suite.experts() is suite.experts()


def test_it_is_scored(suite: Suite) -> None:
    references, model = suite.references(), suite.merged("average")
    scores = evaluate(
        [*references.values(), model],
        suite.tasks,
        protocols=["current", "aligned-c"],
        experts=suite.experts(),
        suite="toy",
        encoding=suite.encoding("cpu", batch=8),
    )
    assert {record.method for record in scores.records} == {"base", "expert", "mtl", "average"}
    assert {record.suite for record in scores.records} == {"toy"}
    assert sorted(path.name for path in suite.folder.iterdir()) == ["base", "features"]


def test_options_say_how_experts_are_opened(suite: Suite, toy: Toy, tmp_path: Path) -> None:
    for name in ("base", *toy.tasks):
        shutil.copytree(toy.folder / name, tmp_path / "own" / name)
    own = replace(
        suite,
        folder=tmp_path / "own",
        paths={task: tmp_path / "own" / task for task in toy.tasks},
        mtl={},
        options={"pooling": "mean"},
    )
    assert {head.pooling for head in own.experts().heads.values()} == {"mean"}
    (tmp_path / "own" / "where" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="where"):
        replace(own).experts()


def test_mistakes(suite: Suite) -> None:
    with pytest.raises(RecipeError, match="did you mean 'ties'"):
        suite.merged("tiess")
    with pytest.raises(RecipeError, match="is fitted to inputs"):
        suite.merged("moma")


def test_where_suites_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path))
    assert suite_root() == tmp_path / "suites"
    monkeypatch.delenv("ORTHOMERGE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert suite_root() == tmp_path / ".cache" / "orthomerge" / "suites"


def test_a_fit_says_what_it_has_seen(suite: Suite) -> None:
    model = suite.fitted("moma", {"steps": 2, "batch": 4, "look": 2}, device="cpu")
    assert (model.title, model.origin.access, set(model.tasks)) == ("moma", "inductive", set(suite.tasks))
    assert suite.fitted("lm_cocktail", {"inputs": 4}, split="test", device="cpu").origin.access == "transductive"
