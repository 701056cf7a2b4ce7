"""A built suite: what is evaluated is merged once, and called by its name."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.evaluation.test_evaluate import PROCESSOR, Toy, make_toy

from orthomerge import Recipe, load, merge
from orthomerge.errors import RecipeError
from orthomerge.merged import read_manifest
from orthomerge.suites import suite as module
from orthomerge.suites.fits import Fitting, fit_all
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

    def counted(recipe: Recipe, *, out: Path, force: bool = False) -> None:
        made.append(out.name)
        merge(recipe, out=out, force=force)

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


@pytest.fixture
def own(toy: Toy, suite: Suite, tmp_path: Path) -> Suite:
    """The suite with experts of its own, which may be changed."""
    experts = {task: tmp_path / "experts" / task for task in toy.tasks}
    for task, folder in experts.items():
        shutil.copytree(toy.folder / task, folder)
    return replace(suite, experts=experts, mtl={})


def retrain(folder: Path) -> None:
    """Change the weights of an expert and nothing else, not even the times of the file."""
    path = folder / "model.safetensors"
    status, content = path.stat(), bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_retrained_expert_is_merged_again(own: Suite, merges: list[str]) -> None:
    own.references()
    stale = own.merged("average")
    before = read_manifest(stale.models["bright"])
    merges.clear()
    retrain(own.experts["where"])  # type: ignore[arg-type]
    again = replace(own)  # as in another process
    assert again.merged("average") == stale
    again.references()
    # Only what it went into is made again: not the other expert alone.
    assert merges == ["average", "base", "expert-where"]
    after = read_manifest(stale.models["bright"])
    assert after["inputs"]["experts"]["bright"] == before["inputs"]["experts"]["bright"]
    assert after["inputs"]["experts"]["where"] != before["inputs"]["experts"]["where"]
    merges.clear()
    again.references()
    again.merged("average")
    assert merges == []


def test_an_expert_retrained_in_the_same_process(own: Suite, merges: list[str]) -> None:
    own.merged("average")
    own.merged("average")  # which looks at every file
    retrain(own.experts["bright"])  # type: ignore[arg-type]
    own.merged("average")
    assert merges == ["average", "average"]


def test_another_base_or_option_is_another_merge(own: Suite, toy: Toy, merges: list[str]) -> None:
    own.merged("average")
    replace(own, options={"dtype": "float16"}).merged("average")
    assert merges == ["average", "average"]
    merges.clear()
    own.merged("ties")
    (own.folder / "base").unlink()
    shutil.copytree(toy.folder / "base", own.folder / "base")
    replace(own).merged("ties")  # the same bytes in another place
    assert merges == ["ties"]
    retrain(own.folder / "base")
    replace(own).merged("ties")
    assert merges == ["ties", "ties"]


@pytest.mark.parametrize("text", ["{", "{}", None])
def test_a_manifest_that_does_not_say(text: str | None, own: Suite, merges: list[str]) -> None:
    path = own.merged("average").models["bright"] / "orthomerge.json"
    if text is None:
        manifest = json.loads(path.read_text())
        del manifest["inputs"]
        text = json.dumps(manifest)
    path.write_text(text)
    own.merged("average")
    assert merges == ["average", "average"]
    assert read_manifest(path.parent)["inputs"]


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


def test_a_fitted_merge_says_what_it_has_seen(suite: Suite) -> None:
    made = suite.fitted("moma", {"steps": 2, "batch": 4, "look": 2}, device="cpu")
    assert (made.name, made.access, set(made.models)) == ("moma", "inductive", set(suite.tasks))
    (out,) = set(made.models.values())
    assert read_manifest(out)["fit"]["access"] == "inductive"
    assert suite.fitted("lm_cocktail", {"inputs": 4}, split="test", device="cpu").access == "transductive"


def test_fits_one_after_the_other(suite: Suite) -> None:
    fittings = [Fitting("moma", {"steps": 2, "batch": 4, "look": 2}, "first"), Fitting("lm_cocktail", {"inputs": 4})]
    told: list[str] = []
    subjects = fit_all(suite, fittings, device="cpu", say=told.append)
    assert [subject.name for subject in subjects] == ["first", "lm_cocktail"]
    assert told == ["fitted: first", "fitted: lm_cocktail"]
