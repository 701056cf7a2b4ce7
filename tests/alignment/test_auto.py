"""What `auto` takes for how many inputs, and when it leaves the head alone."""

from __future__ import annotations

import math
from statistics import mean

import pytest
import torch
from tests.alignment.planted import PlantedTask, accuracy, doubles, planted_task, same_head, weight_of
from tests.alignment.toys import HEADS, head_of, linear_head, pair_of, random

from orthomerge.alignment.auto import Auto
from orthomerge.alignment.distillation import divergence
from orthomerge.alignment.folding import logits_from
from orthomerge.alignment.kl_map import DEFAULT, KlMap, KlProblem
from orthomerge.alignment.problem import Problem
from orthomerge.alignment.ridge import Ridge
from orthomerge.errors import RecipeError
from orthomerge.features.features import FeaturePair


@pytest.mark.parametrize(
    ("per_class", "aligner"),
    [(1, "kl-map"), (3, "kl-map"), (4, "ridge"), (10, "ridge"), (29, "ridge")],
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


def stretched(task: PlantedTask, *, seed: int) -> FeaturePair:
    """The expert is surer of some inputs than of others, for reasons that merged features do not show."""
    expert = task.pair.expert.values
    middle = expert.mean(0)
    return pair_of(
        task.pair.merged.values, middle + (expert - middle) * (1 + 9 * random(len(expert), 1, seed=seed).abs())
    )


@pytest.mark.parametrize("per_class", [25, 100])
@pytest.mark.parametrize("seed", range(3))
def test_many_inputs_choose_by_the_same_held_out_divergence(seed: int, per_class: int) -> None:
    """A linear truth is ridge's; logits whose size says nothing are kl-map's, and ridge would spend itself on them."""
    task = planted_task(per_class, seed=seed)
    for pair, aligner in ((task.pair, "ridge"), (stretched(task, seed=seed), "kl-map")):
        problem = Problem.of(pair, task.head)
        found = Auto().align(problem)
        kl = KlProblem(problem)
        chosen = kl.chosen()
        none, ours, ridge = kl.rivals(chosen).mean(1).tolist()
        assert (found.facts["kept"], found.facts["aligner"]) == (True, aligner)
        assert (ridge < ours) == (aligner == "ridge")
        assert min(ridge, ours) < none
        named = KlMap(chosen) if aligner == "kl-map" else Ridge()
        assert same_head(found.classifier, named.align(problem).classifier)


@pytest.mark.parametrize(
    ("classes", "lead", "aligner"),
    [
        (3, -1.1, "ridge"),
        (3, 0.9, "ridge"),
        (3, 1.1, "kl-map"),
        (8, -1.1, "ridge"),
        (8, -0.9, "kl-map"),
        (8, 1.1, "kl-map"),
    ],
)
def test_in_doubt_the_number_of_inputs_decides(
    classes: int, lead: float, aligner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kl-map is ahead by so many standard errors; 90 inputs are fewer than four a feature, 240 are more."""
    noise = random(100).double()
    noise = (noise - noise.mean()) / noise.std()
    rivals = torch.stack([torch.full_like(noise, 9.0), 1 + noise - lead / 10, torch.ones_like(noise)])
    monkeypatch.setattr(KlProblem, "rivals", lambda self, strength: rivals)
    task = planted_task(30, classes=classes, d=32)
    assert Auto().fit(task.pair, task.head).facts["aligner"] == aligner


def test_rivals_are_judged_on_what_they_have_not_seen() -> None:
    """Fewer than 500 inputs: all of them, in five folds. Ridge without a fold is ridge on the rest, with lambda for the
    smaller number."""
    problem = Problem.of(planted_task(12, classes=3, d=6).pair, planted_task(12, classes=3, d=6).head)
    kl, n = KlProblem(problem), len(problem.H)
    none, _, ridge = kl.rivals(0.3)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    fold = torch.arange(n) % 5
    a, X = problem.spectrum.a, torch.cat([problem.H, torch.full((n, 1), problem.spectrum.a, dtype=torch.float64)], 1)
    wanted = []
    for number in range(5):
        train, test = order[fold != number], order[fold == number]
        penalty = problem.strength * problem.spectrum.unit * len(train) / n * torch.eye(7, dtype=torch.float64)
        D = torch.linalg.solve(X[train].T @ X[train] + penalty, X[train].T @ problem.residual[train])
        logits = logits_from(problem.head, problem.H[test]) + X[test] @ D
        wanted += [divergence(problem.Z[row : row + 1], z[None]) for row, z in zip(test.tolist(), logits, strict=True)]
    assert a > 0
    torch.testing.assert_close(ridge, torch.tensor(wanted, dtype=torch.float64), rtol=1e-8, atol=1e-10)
    assert float(none.mean()) == pytest.approx(divergence(problem.Z, logits_from(problem.head, problem.H)))
    many = Problem.of(planted_task(700, classes=3, d=6).pair, problem.head)
    assert KlProblem(many).rivals(math.inf).shape == (3, 840)  # two folds of five hold 500


def test_the_limits_are_options() -> None:
    task = planted_task(3)
    assert Auto(few=2).fit(task.pair, task.head).facts["aligner"] == "ridge"
    assert Auto(few=4).fit(task.pair, task.head).facts["aligner"] == "kl-map"
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
