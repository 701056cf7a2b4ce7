"""Alignments by the library that cannot be: an error, and nothing left behind. The command's are in `cases.py`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.aligning import contents

from orthomerge.alignment.aligners import Alignment
from orthomerge.alignment.linear_maps import Ridge
from orthomerge.api.align import align
from orthomerge.api.load import load
from orthomerge.core.errors import (
    CheckpointError,
    IncompatibleError,
    NumericalError,
    OrthomergeError,
    OutputError,
    RecipeError,
)
from orthomerge.data.reading import read_task
from orthomerge.data.task import Examples, Task
from orthomerge.models.encoding import Encoding
from orthomerge.models.experts import reopen_experts
from orthomerge.models.features import FeaturePair
from orthomerge.models.heads import Head, Linear
from orthomerge.models.opening import Expert, HeadNames
from orthomerge.runs.models import write
from orthomerge.runs.recipe import Recipe

LABELS = ("two-0", "two-1")
Given = dict[str, Any]
Change = Callable[[Given], object]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path_factory.getbasetemp() / "fault-cache"))


@pytest.fixture
def given(merged_berts: Path, berts: Path, tables: Path, tmp_path: Path) -> Given:
    """Arguments that would do, in a folder of their own."""
    folder = tmp_path / "work"
    folder.mkdir()
    return {
        "path": shutil.copytree(merged_berts, folder / "out"),
        "data": {"two": tables / "two.csv"},
        "experts": {"two": shutil.copytree(berts / "two", folder / "two")},
        "aligner": "ridge",
        "encoding": Encoding(device="cpu"),
        "to": folder / "to",
    }


def carry_out(given: Given, *, force: bool = False) -> None:
    """From a folder to a folder. `experts`: where they are now; without any, they are where they were."""
    folders = ("path", "experts", "to", "force")
    options = {name: value for name, value in given.items() if name not in folders}
    model = load(given["path"])
    experts = None
    if given["experts"]:
        experts = reopen_experts(model, experts=given["experts"], tasks=tuple(given["data"]))
    align(model, **options, experts=experts).save(given["to"], force=given.get("force", force))


def refused(given: Given, error: type[OrthomergeError], match: str) -> None:
    """The call fails, and the folder is as it was."""
    folder = given["path"].parent
    before, names = contents(folder), sorted(folder.rglob("*"))
    with pytest.raises(error, match=match):
        carry_out(given)
    assert contents(folder) == before
    assert sorted(folder.rglob("*")) == names


def put(name: str, value: Any) -> Change:
    return lambda given: given.update({name: value})


def into_an_expert(given: Given) -> None:
    """The place of the expert is on record; it need not be named."""
    base = json.loads((given["path"] / "orthomerge.local.json").read_text())["places"][""]["absolute"]
    given["path"] = given["path"].parent / "alone"
    write(Recipe({"two": str(given["experts"]["two"])}, base=base, method="average"), out=given["path"])
    given["to"] = given["experts"]["two"] / "to"
    given["experts"] = {}


PICTURES = Examples(list(np.zeros((4, 8, 8), dtype=np.uint8)), None, "train")
EMPTY = Examples([], None, "train")
REFUSED: dict[str, tuple[Change, type[OrthomergeError], str]] = {
    "no data": (
        lambda given: given.update(data={}, experts={}),
        RecipeError,
        "there is no data: give --data TASK=PATH for at least one task",
    ),
    "no such expert": (put("experts", {"two": "./nowhere"}), CheckpointError, "'./nowhere' does not exist"),
    "pictures for a text model": (
        put("data", {"two": Task("two", LABELS, "image", {"train": PICTURES})}),
        IncompatibleError,
        "reads inputs of modality 'text', but those of 'two' are",
    ),
    "data of another task": (
        lambda given: given.update(data={"two": replace(read_task(given["data"]["two"]), labels=("yes", "no"))}),
        IncompatibleError,
        "labels of task 'two' are not those of its expert",
    ),
    "an empty split": (
        put("data", {"two": Task("two", LABELS, "text", {"train": EMPTY})}),
        RecipeError,
        "the train split of 'two' is empty",
    ),
    "into an expert": (into_an_expert, OutputError, "overlaps the input"),
}


@pytest.mark.parametrize(("change", "error", "match"), REFUSED.values(), ids=REFUSED)
def test_refused_with_nothing_left(change: Change, error: type[OrthomergeError], match: str, given: Given) -> None:
    change(given)
    refused(given, error, match)


def test_an_aligner_that_fails_leaves_nothing(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(self: Ridge, pair: FeaturePair, head: Head) -> Alignment:
        raise ZeroDivisionError

    monkeypatch.setattr(Ridge, "fit", fit)
    before = contents(given["to"].parent)
    with pytest.raises(ZeroDivisionError):
        carry_out(given)
    assert contents(given["to"].parent) == before
    assert sorted(path.name for path in given["to"].parent.iterdir()) == ["out", "two"]


def classifiers() -> dict[str, tuple[Callable[[Head, torch.Tensor], Any], type[OrthomergeError], str]]:
    def steep(head: Head, features: torch.Tensor) -> Head:
        """Long weights at right angles to the few inputs there are: float32 has not enough digits for that."""
        unseen = torch.linalg.svd(features.double()).Vh[-1]
        return replace(head, output=Linear(head.output.weight.double() + 1e5 * unseen, head.output.bias))

    def other(head: Head, features: torch.Tensor) -> Head:
        return Head(Linear(torch.ones(2, 5), torch.ones(2)), head.labels)

    def infinite(head: Head, features: torch.Tensor) -> Head:
        return replace(head, output=Linear(head.output.weight.double() * 1e300, head.output.bias))

    def renamed(head: Head, features: torch.Tensor) -> Head:
        return replace(head, labels=("a", "b"))

    class Odd:
        labels = ("two-0", "two-1")

    return {
        "not float32": (
            steep,
            NumericalError,
            "the logits of 'two' change by .* of the largest when they are rounded to float32",
        ),
        "too large": (infinite, NumericalError, "the logits of 'two' change by nan of the largest"),
        "wider": (other, IncompatibleError, "the aligned head of 'two' has not the shapes and dtypes"),
        "renamed": (renamed, IncompatibleError, "has other labels than the head"),
        "no head at all": (
            lambda head, features: Odd(),
            RecipeError,
            "is a Odd, which cannot be saved; an aligner must return",
        ),
    }


@pytest.mark.parametrize(("make", "error", "match"), classifiers().values(), ids=classifiers())
def test_what_cannot_be_saved_as_it_is(
    make: Callable[[Head, torch.Tensor], Any],
    error: type[OrthomergeError],
    match: str,
    given: Given,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Ridge, "fit", lambda self, pair, head: Alignment(make(head, pair.merged.values)))
    refused({**given, "limit": 8}, error, match)


def test_force_replaces_an_output_whole(given: Given) -> None:
    carry_out(given)
    first = contents(given["to"])
    carry_out({**given, "options": {"strength": 1.0}}, force=True)
    assert contents(given["to"]).keys() == first.keys()
    assert contents(given["to"]) != first
    refused(
        {**given, "aligner": "ridge", "options": {"strength": -1.0}, "force": True}, RecipeError, "must be 0 or more"
    )


def test_a_module_of_the_users_own_cannot_be_encoded(tmp_path: Path) -> None:
    body = {"body.w": torch.ones(3, 3)}
    save_file(body, tmp_path / "base.safetensors")
    save_file({"body.w": torch.eye(3) + 1, "fc.weight": torch.ones(2, 3)}, tmp_path / "a.safetensors")
    expert = Expert(str(tmp_path / "a.safetensors"), head=HeadNames(("fc",)))
    recipe = Recipe({"a": expert}, base=str(tmp_path / "base.safetensors"), family="generic", encoder_prefix="body")
    write(recipe, out=tmp_path / "out")
    with pytest.raises(RecipeError, match="is of a module of your own, which cannot be built here"):
        align(tmp_path / "out", {"a": "x"})
