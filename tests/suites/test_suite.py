"""A built suite: what is evaluated is merged once, and called by its name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.evaluation.test_evaluate import PROCESSOR, Toy, make_toy

from orthomerge import Recipe, load, merge
from orthomerge.errors import RecipeError
from orthomerge.merged import read_manifest
from orthomerge.suites import suite as module
from orthomerge.suites.suite import Suite, suite_root


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def suite(toy: Toy, tmp_path: Path) -> Suite:
    (tmp_path / "base").symlink_to(toy.folder / "base")
    experts = {task: toy.folder / task for task in toy.tasks}
    return Suite("toy", tmp_path, toy.tasks, PROCESSOR, experts, mtl=experts)


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The outputs that were made."""
    made: list[str] = []

    def counted(recipe: Recipe, *, out: Path) -> None:
        made.append(out.name)
        merge(recipe, out=out)

    monkeypatch.setattr(module, "merge", counted)
    return made


def test_references_are_made_once(suite: Suite, toy: Toy, merges: list[str]) -> None:
    references = suite.references()
    assert list(references) == ["base", "expert", "mtl"]
    assert all(subject.name == name for name, subject in references.items())
    assert merges == ["base", "expert-bright", "expert-where", "mtl-bright", "mtl-where"]
    assert suite.references() == references
    assert len(merges) == 5
    assert references["base"].models == dict.fromkeys(toy.tasks, suite.folder / "models" / "base")
    plain = load(toy.folder / "out" / "bright").encoder.state_dict()
    expert, base = (load(references[name].models["bright"]).encoder.state_dict() for name in ("expert", "base"))
    assert all(tensor.equal(plain[key]) for key, tensor in expert.items())
    assert not any(tensor.equal(plain[key]) for key, tensor in base.items())
    assert "mtl" not in replace(suite, mtl={}).references()


def test_a_merge_is_made_once(suite: Suite, toy: Toy, merges: list[str]) -> None:
    subject = suite.merged("task_arithmetic", {"scale": 0.5})
    assert (subject.name, subject.parameters, subject.access) == ("task_arithmetic", {"scale": 0.5}, "data-free")
    out = suite.folder / "models" / "task_arithmetic-scale=0.5"
    assert subject.models == dict.fromkeys(toy.tasks, out)
    assert suite.merged("task_arithmetic", {"scale": 0.5}) == subject
    other = suite.merged("task_arithmetic", {"scale": 0.4})
    assert other.models != subject.models
    assert merges == ["task_arithmetic-scale=0.5", "task_arithmetic-scale=0.4"]
    assert read_manifest(out)["method"]["parameters"] == {"scale": 0.5}
    assert list(read_manifest(out)["heads"]) == list(toy.tasks)


def test_options_in_any_order_are_the_same_merge(suite: Suite, merges: list[str]) -> None:
    suite.merged("ties", {"scale": 0.5, "density": 0.3})
    suite.merged("ties", {"density": 0.3, "scale": 0.5})
    assert merges == ["ties-density=0.3-scale=0.5"]


def test_the_recipe(suite: Suite, toy: Toy) -> None:
    recipe = replace(suite, options={"dtype": "float16"}).recipe("ties", {"density": 0.3}, seed=3)
    assert (recipe.method, recipe.parameters, recipe.seed, recipe.dtype) == ("ties", {"density": 0.3}, 3, "float16")
    assert recipe.base == str(suite.folder / "base")
    assert list(recipe.experts) == list(toy.tasks)


def test_mistakes(suite: Suite) -> None:
    assert suite.task("where").name == "where"
    with pytest.raises(RecipeError, match=r"suite 'toy' has no task 'were'; did you mean 'where'\?"):
        suite.task("were")
    with pytest.raises(RecipeError, match="did you mean 'ties'"):
        suite.merged("tiess")
    assert not (suite.folder / "models" / "tiess").exists()


def test_where_suites_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path))
    assert suite_root() == tmp_path / "suites"
    monkeypatch.delenv("ORTHOMERGE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert suite_root() == tmp_path / ".cache" / "orthomerge" / "suites"
