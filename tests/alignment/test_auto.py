"""What `auto` takes for how many inputs, and when it leaves the head alone."""

from __future__ import annotations

import math
from statistics import mean

import pytest
import torch
from tests.alignment.planted import accuracy, doubles, planted_task, same_head, weight_of
from tests.alignment.toys import HEADS, head_of, linear_head, pair_of, random

from orthomerge.alignment.auto import Auto
from orthomerge.alignment.kl_map import DEFAULT, KlMap
from orthomerge.alignment.ridge import Ridge
from orthomerge.errors import RecipeError
from orthomerge.features.features import FeaturePair


@pytest.mark.parametrize(
    ("per_class", "aligner"),
    [(1, "kl-map"), (3, "kl-map"), (4, "ridge"), (10, "ridge"), (29, "ridge"), (30, "kl-map")],
)
def test_the_number_of_inputs_a_class_decides(per_class: int, aligner: str) -> None:
    """And the head is that of the named aligner, to the last bit."""
    task = planted_task(per_class)
    found = Auto(few=4, many=30).fit(task.pair, task.head)
    assert (found.facts["kept"], found.facts["aligner"]) == (True, aligner)
    strength = float(found.facts["strength"])
    if per_class < 4:
        assert strength == DEFAULT
    named = KlMap(strength) if aligner == "kl-map" else Ridge()
    assert same_head(found.classifier, named.fit(task.pair, task.head).classifier)
    assert not same_head(found.classifier, task.head)
    assert accuracy(found.classifier, task) > task.unaligned


def test_the_limits_are_options() -> None:
    task = planted_task(3)
    assert Auto(few=2).fit(task.pair, task.head).facts["aligner"] == "ridge"
    assert Auto(few=1, many=2).fit(task.pair, task.head).facts["aligner"] == "kl-map"
    for few, many in ((-1.0, 2.0), (3.0, 2.0), (math.nan, 2.0)):
        with pytest.raises(RecipeError, match="'few' and 'many' must be 0 <= few <= many, got"):
            Auto(few=few, many=many)


@pytest.mark.parametrize("kind", HEADS)
def test_one_input_changes_nothing(kind: str) -> None:
    head = head_of(kind)
    found = Auto().fit(pair_of(doubles(1, 6), doubles(1, 6, seed=1)), head)
    assert found.classifier is head
    assert found.facts == {"kept": False, "why": "one input cannot be judged"}


@pytest.mark.parametrize("per_class", [5, 20])
def test_a_teacher_who_differs_by_noise_alone_changes_nothing(per_class: int) -> None:
    """There is nothing to learn: what one part of the inputs asks for, the others do not."""
    kept = []
    for seed in range(6):
        task = planted_task(per_class, seed=seed)
        merged = task.pair.merged.values
        found = Auto().fit(pair_of(merged, merged + random(*merged.shape, seed=seed)), task.head)
        kept.append(found.facts["kept"])
        if not kept[-1]:
            assert found.classifier is task.head
            assert found.facts == {"kept": False, "aligner": "ridge", "why": "no held-out loss fell"}
        change = weight_of(found.classifier) - weight_of(task.head)
        assert change.norm() < 1e-3 * weight_of(task.head).norm()  # chance may see a little
    assert sum(map(bool, kept)) <= 1


@pytest.mark.parametrize("seed", range(4))
def test_with_few_inputs_the_head_stays_if_the_loss_surely_rises(seed: int) -> None:
    """Three inputs a class and a teacher who differs by noise; and one who does not."""
    head, merged = linear_head(doubles(4, 10, seed=90 + seed) / math.sqrt(10), doubles(4)), doubles(12, 10, seed=seed)
    found = Auto().fit(pair_of(merged, merged + 0.1 * doubles(12, 10, seed=50 + seed)), head)
    assert found.facts == {"kept": False, "aligner": "kl-map", "why": "no held-out loss fell"}
    assert found.classifier is head
    task = planted_task(3, seed=seed)
    assert Auto().fit(task.pair, task.head).facts["kept"] is True


def shuffled(pair: FeaturePair, *, seed: int) -> FeaturePair:
    order = torch.randperm(len(pair.expert), generator=torch.Generator().manual_seed(seed))
    return FeaturePair(pair.merged, pair.expert.take(order))


@pytest.mark.parametrize("per_class", [3, 10, 30])
def test_a_shuffled_teacher_never_helps(per_class: int) -> None:
    """The negative control. Held-out inputs are shuffled too and agree that the head is wrong, so it is not kept as it
    is; but what it becomes is a constant, and no better than what it was."""
    gains = []
    for seed in range(2):
        task = planted_task(per_class, seed=seed, angle=0.5, shrink=0.9)
        found = Auto().fit(shuffled(task.pair, seed=seed), task.head)
        gains.append(accuracy(found.classifier, task) - task.unaligned)
    assert mean(gains) < 0.01
    if per_class >= 30:
        assert mean(gains) < -0.5


@pytest.mark.parametrize("per_class", [5, 60])
def test_an_expert_unchanged_by_the_merge_stays_as_it_is(per_class: int) -> None:
    task = planted_task(per_class)
    pair = FeaturePair(task.pair.expert, task.pair.expert)
    assert same_head(Auto().fit(pair, task.head).classifier, task.head)
