"""What `auto` takes for how many inputs, and when it leaves the head alone."""

import math
from statistics import mean

import pytest
import torch
from tests.alignment.planted import (
    PlantedTask,
    accuracy,
    divergence,
    doubles,
    head_in,
    planted_task,
    same_head,
    weight_of,
)

from orthomerge.alignment.auto import Auto
from orthomerge.alignment.folding import logits_from
from orthomerge.alignment.kl_map import DEFAULT, KlMap, KlProblem
from orthomerge.alignment.linear_maps import Ridge
from orthomerge.alignment.problem import Problem
from orthomerge.core.errors import RecipeError
from orthomerge.models.features import FeaturePair
from orthomerge.testing.toys import HEADS, head_of, linear_head, pair_of, random

MEAN = "mean of ridge and kl-map"


@pytest.mark.parametrize(("per_class", "few"), [(1, 4), (3, 4), (5, 6)])
def test_few_inputs_a_class_are_for_kl_map_under_its_default_prior(per_class: int, few: int) -> None:
    """And the head is that of the named aligner, to the last bit."""
    task = planted_task(per_class)
    found = Auto(few=few).fit(task.pair, task.head)
    assert (found.facts["kept"], found.facts["aligner"], found.facts["strength"]) == (True, "kl-map", DEFAULT)
    assert same_head(found.classifier, KlMap(DEFAULT).fit(task.pair, task.head).classifier)
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
def test_held_out_inputs_may_speak_for_kl_map_alone(seed: int, per_class: int) -> None:
    """Logits whose size says nothing are kl-map's: ridge would spend itself on them. A linear truth is not."""
    task = planted_task(per_class, seed=seed)
    problem = Problem.of(stretched(task, seed=seed), task.head)
    found, kl = Auto().align(problem), KlProblem(problem)
    chosen = kl.chosen()
    none, ours, ridge, both = kl.candidate_losses(chosen).mean(1).tolist()
    assert ours < min(none, ridge, both)
    assert (found.facts["kept"], found.facts["aligner"]) == (True, "kl-map")
    assert same_head(found.classifier, KlMap(chosen).align(problem).classifier)
    straight = Auto().fit(task.pair, task.head)
    assert straight.facts["aligner"] in ("ridge", MEAN)
    assert accuracy(straight.classifier, task) > task.unaligned


@pytest.mark.parametrize("per_class", [4, 30])
@pytest.mark.parametrize(
    ("kl_map", "ridge", "aligner"), [(-0.9, 0.9, MEAN), (0.9, -0.9, MEAN), (1.1, -3.0, "kl-map"), (-3.0, 1.1, "ridge")]
)
def test_in_doubt_it_is_the_mean(
    per_class: int, kl_map: float, ridge: float, aligner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either is ahead of the mean by so many standard errors."""
    noise = random(100).double()
    noise = (noise - noise.mean()) / noise.std()
    losses = [torch.full_like(noise, 9.0), *(1 + noise - lead / 10 for lead in (kl_map, ridge)), torch.ones_like(noise)]
    monkeypatch.setattr(KlProblem, "candidate_losses", lambda self, strength: torch.stack(losses))
    task = planted_task(per_class, classes=5)
    assert Auto().fit(task.pair, task.head).facts["aligner"] == aligner


@pytest.mark.parametrize("kind", HEADS)
def test_the_mean_lies_halfway(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between what the two aligners find: first maps, and for a head of one layer logits."""
    head, X = head_of(kind), random(8, 6, seed=5)
    problem = Problem.of(pair_of(doubles(60, 6), doubles(60, 6, seed=1) + doubles(60, 6)), head)
    level = torch.tensor([9.0, 1.0, 1.0, 1.0], dtype=torch.float64)[:, None].expand(4, 60)
    monkeypatch.setattr(KlProblem, "candidate_losses", lambda self, strength: level)
    found, ridge, kl = (aligner.align(problem) for aligner in (Auto(), Ridge(), KlMap()))
    strengths = {"strength of ridge": ridge.facts["strength"], "strength of kl-map": kl.facts["strength"]}
    assert found.facts == {"kept": True, "aligner": MEAN, **strengths}
    made, one, other = (head_in(each.classifier).tensors() for each in (found, ridge, kl))
    torch.testing.assert_close(made, {name: (one[name] + other[name]) / 2 for name in made})
    if head.hidden is None:
        torch.testing.assert_close(found.classifier(X), (ridge.classifier(X) + kl.classifier(X)) / 2)


def test_candidates_are_compared_on_inputs_that_they_were_not_fitted_to() -> None:
    """Fewer than 500 inputs: all of them, in five folds. Ridge without a fold is ridge on the rest, with lambda for the
    smaller number."""
    problem = Problem.of(planted_task(12, classes=3, d=6).pair, planted_task(12, classes=3, d=6).head)
    kl, n = KlProblem(problem), len(problem.H)
    none, ours, ridge, both = kl.candidate_losses(0.3)
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
    assert bool((both < torch.maximum(ours, ridge) + 1e-12).all())  # the divergence is convex in the logits
    assert float(none.mean()) == pytest.approx(divergence(problem.Z, logits_from(problem.head, problem.H)))
    many = Problem.of(planted_task(700, classes=3, d=6).pair, problem.head)
    assert KlProblem(many).candidate_losses(math.inf).shape == (4, 840)  # two folds of five hold 500


def test_the_limits_are_options_and_many_classes_are_enough() -> None:
    task = planted_task(3)
    assert Auto(few=2).fit(task.pair, task.head).facts["aligner"] == MEAN
    assert Auto(few=4).fit(task.pair, task.head).facts["aligner"] == "kl-map"
    assert Auto(enough=15).fit(task.pair, task.head).facts["aligner"] == MEAN
    assert Auto(enough=16).fit(task.pair, task.head).facts["aligner"] == "kl-map"
    for options in ({"few": -1.0}, {"few": math.nan}, {"enough": -1}):
        with pytest.raises(RecipeError, match=r"'(few|enough)' must be (at least 0|a finite number), got"):
            Auto(**options)
    task = planted_task(1, classes=40)
    found = Auto().fit(task.pair, task.head)
    assert (found.facts["kept"], found.facts["aligner"]) == (True, MEAN)
    assert accuracy(found.classifier, task) > task.unaligned
    assert Auto(enough=41).fit(task.pair, task.head).facts["aligner"] == "kl-map"


@pytest.mark.parametrize("kind", HEADS)
def test_one_input_changes_nothing(kind: str) -> None:
    head = head_of(kind)
    found = Auto().fit(pair_of(doubles(1, 6), doubles(1, 6, seed=1)), head)
    assert found.classifier is head
    assert found.facts == {"kept": False, "why": "one input cannot be judged"}


@pytest.mark.parametrize("per_class", [5, 20])
def test_a_teacher_who_differs_by_noise_alone_does_no_harm(per_class: int) -> None:
    """There is nothing to learn but how unsure the teacher is: least squares changes nothing, and answers stay good."""
    gains, ridges = [], []
    for seed in range(6):
        task = planted_task(per_class, seed=seed)
        merged = task.pair.merged.values
        problem = Problem.of(pair_of(merged, merged + random(*merged.shape, seed=seed)), task.head)
        found = Auto().align(problem)
        gains.append(accuracy(found.classifier, task) - task.unaligned)
        ridges.append((weight_of(Ridge().align(problem).classifier) - weight_of(task.head)).norm())
        if not found.facts["kept"]:
            assert found.classifier is task.head
            assert found.facts["why"] == "no held-out loss fell"
    assert max(map(float, ridges)) < 1e-3 * float(weight_of(task.head).norm())
    assert mean(gains) > -0.005


@pytest.mark.parametrize("per_class", [5, 30])
def test_the_head_stays_where_no_held_out_loss_falls(per_class: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the divergence nor the squared error of the logits, which is all noise."""
    task = planted_task(per_class)
    merged = task.pair.merged.values
    worse = torch.tensor([1.0, 1.2, 1.0, 1.1], dtype=torch.float64)[:, None].expand(4, 50)
    monkeypatch.setattr(KlProblem, "candidate_losses", lambda self, strength: worse + random(50).double())
    found = Auto().fit(pair_of(merged, merged + random(*merged.shape)), task.head)
    assert found.classifier is task.head
    assert found.facts["kept"] is False
    assert found.facts["why"] == "no held-out loss fell"


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
