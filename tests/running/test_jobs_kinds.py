"""Kinds of jobs by themselves: what a survey found and sums of inputs, written and read back to the last bit."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from orthomerge.alignment.sums import Sums
from orthomerge.errors import CheckpointError
from orthomerge.merging.kinds import SurveyMethod
from orthomerge.merging.methods import METHODS, make_method
from orthomerge.merging.stream import prepare
from orthomerge.merging.vectors import Difference, InMemory, TaskVector, TaskVectors
from orthomerge.running.jobs.kinds.statistics import read_sums, write_sums
from orthomerge.running.jobs.kinds.survey import FILE, read_survey, told
from orthomerge.running.jobs.kinds.table import KINDS

SURVEYS = [name for name, row in METHODS.items() if hasattr(make_method(name, {}, tasks=("a", "b")), "survey")]


def vectors() -> TaskVectors:
    generator = torch.Generator().manual_seed(0)

    def model() -> InMemory:
        shapes = {"layer.weight": (6, 5), "layer.bias": (6,)}
        return InMemory({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()})

    base = model()
    return TaskVectors({task: TaskVector(base, ((1.0, Difference(model())),)) for task in ("a", "b")})


@pytest.mark.parametrize("name", SURVEYS)
def test_what_a_survey_found_is_read_back(name: str, tmp_path: Path) -> None:
    method, given = cast("SurveyMethod", make_method(name, {}, tasks=("a", "b"), seed=3)), vectors()
    found = prepare(method, given)
    document = told(method, found)
    assert (document is None) == (name == "knots")
    (tmp_path / FILE).write_text(json.dumps(document))
    again = read_survey(tmp_path, method, lambda: prepare(method, given))
    assert type(again) is type(found)
    if document is not None:
        assert again == found
    for ours, theirs in zip(given.blocks(scope="matrix"), vectors().blocks(scope="matrix"), strict=True):
        one = found.merge(ours.base, ours.deltas, site=ours.site)
        assert torch.equal(one, again.merge(theirs.base, theirs.deltas, site=theirs.site))


def test_a_survey_of_another_method(tmp_path: Path) -> None:
    method = cast("SurveyMethod", make_method("ties", {}, tasks=("a", "b"), seed=0))
    (tmp_path / FILE).write_text(json.dumps({"class": "torch", "own": [], "values": {}}))
    with pytest.raises(CheckpointError, match="is not of the method Ties; remove it, and run again"):
        read_survey(tmp_path, method, lambda: prepare(method, vectors()))


def test_sums_are_read_back(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    H, T = (torch.randn(23, 4, generator=generator) for _ in range(2))
    sums = Sums.zero(4, "two").add(H, T, first=2)
    write_sums(tmp_path, sums, H[:7])
    found, sample = read_sums(tmp_path, "two")
    assert (found.n, found.task) == (23, "two")
    assert torch.equal(sample, H[:7])
    for ours, theirs in zip(sums.parts, found.parts, strict=True):
        assert ours.n == theirs.n
        for name in ("sum_h", "sum_t", "C", "S", "tt"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_where_the_table_says(name: str) -> None:
    kind: Any = KINDS[name]
    module, _, function = kind.maker.partition(":")
    assert function in import_module(module).__all__
    assert callable(kind.load())
