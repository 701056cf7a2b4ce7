"""Contracts that every row of the table of aligners keeps."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from itertools import product
from statistics import mean
from typing import Any

import pytest
import torch
from tests.alignment.planted import accuracy, doubles, planted_task, same_head
from tests.alignment.toys import HEADS, head_of, linear_head, pair_of, random, rotation

from orthomerge.alignment.aligner import Aligner
from orthomerge.alignment.aligners import ALIGNERS, Row, aligner_class, aligners, find_aligner, make_aligner
from orthomerge.alignment.problem import Problem
from orthomerge.core.errors import IncompatibleError, NumericalError, RecipeError
from orthomerge.evaluation.answers import extra_numbers
from orthomerge.models.features import FeaturePair
from orthomerge.models.heads import Head

D = 6
CHEAP: Mapping[str, Mapping[str, Any]] = {
    "kl-map": {"strength": 0.1},
    "aligned-c": {"epochs": 2},
    "aligned-m": {"steps": 10},
    "orth-m": {"steps": 10},
    "moma-orthogonal": {"steps": 10},
    "surgery": {"steps": 10},
    "probsurgery": {"steps": 10},
}
CLOSED = ("ridge", "orthogonal", "similarity", "scaling", "linear", "invertible", "affine", "logit-procrustes")
OURS = ("auto", "kl-map", *CLOSED)
every = pytest.mark.parametrize("name", ALIGNERS)


def cheap(name: str) -> Aligner:
    return make_aligner(name, CHEAP.get(name, {}))


def pair(count: int = 12, *, d: int = D) -> FeaturePair:
    expert = random(count, d, seed=1) + 1
    return pair_of(0.7 * expert @ rotation(d) + 0.3 * random(count, d), expert)


def tensors_of(classifier: Any) -> dict[str, torch.Tensor]:
    """All that the classifier consists of."""
    if isinstance(classifier, Head):
        return classifier.tensors()
    return {**classifier.head.tensors(), **classifier.extra_tensors()}


@every
def test_a_row_says_what_its_class_is(name: str) -> None:
    row = ALIGNERS[name]
    made = aligner_class(row)
    assert row.name == name
    assert row.title
    assert row.reference
    assert is_dataclass(made)
    assert inspect.getdoc(made)
    assert inspect.getdoc(inspect.getmodule(made))
    with pytest.raises(AttributeError):
        cheap(name).seed = 1  # type: ignore[attr-defined]  # frozen


@every
def test_the_head_keeps_its_form_and_the_inputs_their_values(name: str) -> None:
    for kind in HEADS:
        _kept(name, head_of(kind))


def _kept(name: str, head: Head) -> None:
    given = pair()
    before = [tensor.clone() for tensor in (*head.tensors().values(), given.merged.values, given.expert.values)]
    found = cheap(name).fit(given, head)
    after = [*head.tensors().values(), given.merged.values, given.expert.values]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert found.classifier.labels == head.labels
    logits = found.classifier(given.merged.values)
    assert logits.shape == (12, 3)
    assert logits.isfinite().all()
    assert all(isinstance(fact, (bool, int, float, str)) for fact in found.facts.values())
    if ALIGNERS[name].extra:
        assert not isinstance(found.classifier, Head)
        assert extra_numbers(found.classifier) > 0
        return
    assert isinstance(found.classifier, Head)
    assert extra_numbers(found.classifier) == 0
    assert (found.classifier.activation, found.classifier.normalise) == (head.activation, head.normalise)
    assert {key: (tensor.shape, tensor.dtype) for key, tensor in found.classifier.tensors().items()} == {
        key: (tensor.shape, tensor.dtype) for key, tensor in head.tensors().items()
    }


@every
def test_the_same_inputs_give_the_same_bits(name: str) -> None:
    one, other = (cheap(name).fit(pair(), head_of("plain")) for _ in range(2))
    assert one.facts == other.facts
    ours, theirs = tensors_of(one.classifier), tensors_of(other.classifier)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())


@every
def test_one_input(name: str) -> None:
    """Nothing can be held out: what chooses a strength by itself changes nothing, the rest does something finite."""
    for kind in HEADS:
        head, given = head_of(kind), pair(1)
        found = cheap(name).fit(given, head)
        assert all(tensor.isfinite().all() for tensor in tensors_of(found.classifier).values())
        if name in OURS and name not in ("kl-map", "scaling"):
            assert same_head(found.classifier, head)


@every
def test_one_class(name: str) -> None:
    head, given = linear_head(random(1, D, seed=3), random(1, seed=4)), pair()
    found = cheap(name).fit(given, head).classifier
    assert found(given.merged.values).isfinite().all()
    assert found(given.merged.values).argmax(1).tolist() == [0] * 12


@every
def test_inputs_that_say_nothing(name: str) -> None:
    """All the same, or all zero."""
    h, t, zero = random(1, D), random(1, D, seed=1), torch.zeros(7, D)
    pairs = [pair_of(h.repeat(count, 1), t.repeat(count, 1)) for count in (2, 11)]
    pairs += [pair_of(zero, random(7, D)), pair_of(random(7, D), zero), pair_of(zero, zero)]
    for kind, given in product(("normalising with bias", "hidden"), pairs):
        found = cheap(name).fit(given, head_of(kind)).classifier
        assert all(tensor.isfinite().all() for tensor in tensors_of(found).values())


@every
def test_an_expert_unchanged_by_the_merge(name: str) -> None:
    """Where there is nothing to undo nothing is done, to the last bit for what has a closed form."""
    given = FeaturePair(pair(30).expert, pair(30).expert)
    head, x = head_of("plain"), given.merged.values
    found = cheap(name).fit(given, head).classifier
    if name in OURS:
        assert torch.equal(found(x), head(x))
    if name != "probsurgery":  # it trains with noise, and has hardly begun
        torch.testing.assert_close(found(x).softmax(1), head(x).softmax(1), rtol=0, atol=0.05)


@every
def test_what_cannot_be_aligned(name: str) -> None:
    aligner, head = cheap(name), head_of("plain")
    with pytest.raises(RecipeError, match="needs at least one input of 'toy', got 0"):
        aligner.fit(pair(0), head)
    with pytest.raises(IncompatibleError, match="head of 'toy' reads 6 features but the merged are 7"):
        aligner.fit(pair(d=7), head)
    narrow = FeaturePair(pair().merged, pair(d=5).expert)
    with pytest.raises(IncompatibleError, match="head of 'toy' reads 6 features but the expert's are 5"):
        aligner.fit(narrow, head)
    for value in (math.nan, math.inf):
        spoilt = random(12, D)
        spoilt[3, 2] = spoilt[5, 1] = value
        with pytest.raises(NumericalError, match="2 of 12 merged features of 'toy' are NaN or infinite; check the"):
            aligner.fit(pair_of(spoilt, random(12, D)), head)
        with pytest.raises(NumericalError, match="2 of 12 expert's features of 'toy' are NaN or infinite"):
            aligner.fit(pair_of(random(12, D), spoilt), head)


@every
def test_options_that_make_no_sense(name: str) -> None:
    with pytest.raises(RecipeError, match="unknown"):
        make_aligner(name, {"no such option": 1})
    for field in fields(aligner_class(ALIGNERS[name])):
        if field.name not in ("strength", "kappa", "prior"):
            continue
        for value in (-1.0, math.nan):
            with pytest.raises(RecipeError, match=f"'{field.name}' must be 0 or more, or auto, got"):
                make_aligner(name, {field.name: value})


def test_options_of_single_rows() -> None:
    for floor in (0.0, 1.0, math.nan):
        with pytest.raises(RecipeError, match="'floor' must be between 0 and 1, got"):
            make_aligner("invertible", {"floor": floor})
    with pytest.raises(RecipeError, match="strength"):
        make_aligner("ridge", {"strength": "much"})


def test_names() -> None:
    assert find_aligner("ridge").maker.endswith("linear_maps:Ridge")
    with pytest.raises(RecipeError, match="unknown aligner 'rigde'; did you mean 'ridge'"):
        make_aligner("rigde")
    assert list(aligners())[: len(ALIGNERS)] == list(ALIGNERS)


def test_plug_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        value = "x:mine"

        def __init__(self, row: object) -> None:
            self.row = row

        def load(self) -> object:
            return self.row

    def found_with(row: object) -> Mapping[str, Row]:
        aligners.cache_clear()
        monkeypatch.setattr("orthomerge.core.rows.entry_points", lambda group: [Entry(row)])
        return aligners()

    try:
        assert "mine" in found_with(Row("mine", "orthomerge.alignment.linear_maps:Ridge", "Mine", "me"))
        assert type(make_aligner("mine")).__name__ == "Ridge"
        for row in (Row("ridge", "x:y", "Taken", "me"), "no row"):
            with pytest.raises(RecipeError, match="the plug-in 'x:mine' must be a Row with a name of its own"):
                found_with(row)
    finally:
        aligners.cache_clear()


def test_a_problem_reads_what_the_head_reads() -> None:
    given = pair()
    plain, unit = (Problem.of(given, head_of(kind)) for kind in ("plain", "normalising"))
    assert torch.equal(plain.H, given.merged.values.double())
    torch.testing.assert_close(unit.T.norm(dim=1), torch.ones(12, dtype=torch.float64))
    assert (plain.biased, unit.biased) == (True, False)
    torch.testing.assert_close(plain.Z, plain.head(given.expert.values).double(), rtol=0, atol=1e-5)


# Few inputs never hurt.

FEW = (1, 2, 5)  # a class, of 5: 5, 10 and 25 inputs of 32 features
SEEDS = 5
NOISE = 0.01  # the mean over 5 draws of 2,000 test inputs is good to about 0.004


@pytest.mark.parametrize(("angle", "shrink"), [(1.0, 0.6), (0.2, 0.95)])
@pytest.mark.parametrize("name", [name for name in OURS if name != "scaling"])
def test_fewer_inputs_than_features_never_hurt(name: str, angle: float, shrink: float) -> None:
    """Where much was lost by merging, and where next to nothing was; rank-deficient in all cases."""
    slow = name in ("kl-map", "auto")
    for per_class in FEW[:2] if name == "kl-map" else FEW:  # its cross-validation takes its time
        gains = []
        for seed in range(2 if slow else SEEDS):
            task = planted_task(per_class, seed=seed, angle=angle, shrink=shrink)
            gains.append(accuracy(make_aligner(name).fit(task.pair, task.head).classifier, task) - task.unaligned)
        assert mean(gains) >= -NOISE


@pytest.mark.parametrize("per_class", FEW)
def test_few_inputs_cost_scaling_no_more_than_its_family_does(per_class: int) -> None:
    """A factor for every feature cannot undo a rotation: the best one may be worse than none, with any number of
    inputs. Few of them add nothing to that."""
    few, many = (
        mean(
            accuracy(make_aligner("scaling").fit(task.pair, task.head).classifier, task) - task.unaligned
            for task in (planted_task(count, seed=seed) for seed in range(SEEDS))
        )
        for count in (per_class, 200)
    )
    assert few >= many - NOISE
    easy = [planted_task(per_class, seed=seed, angle=0.2, shrink=0.95) for seed in range(SEEDS)]
    gains = [
        accuracy(make_aligner("scaling").fit(task.pair, task.head).classifier, task) - task.unaligned for task in easy
    ]
    assert mean(gains) >= -NOISE


@pytest.mark.parametrize("name", [name for name in OURS if name not in ("scaling", "auto", "kl-map")])
def test_inputs_in_a_plane_never_hurt(name: str) -> None:
    """Many inputs, but all on one line: rank 1, and noise in the teacher."""
    gains = []
    for seed in range(SEEDS):
        task = planted_task(1, seed=seed)
        merged, expert = task.pair.merged.values, task.pair.expert.values
        line = torch.linspace(0, 1, 40)[:, None]
        given = pair_of(merged[0] + line * (merged[1] - merged[0]), expert[0] + line * (expert[1] - expert[0]))
        noisy = pair_of(given.merged.values, given.expert.values + 0.1 * doubles(40, 32, seed=seed).float())
        gains.append(accuracy(make_aligner(name).fit(noisy, task.head).classifier, task) - task.unaligned)
    assert mean(gains) >= -NOISE
