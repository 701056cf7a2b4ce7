"""Trained maps against Eq. 7, 8 and 9 written out for autograd, folded exactly, and beside Procrustes."""

import math
from dataclasses import replace

import pytest
import torch
from tests.alignment.planted import by_autograd, head_in, weight_of
from torch.nn.functional import kl_div, normalize

from orthomerge.alignment.folding import logits_from
from orthomerge.alignment.problem import Problem
from orthomerge.alignment.rigid import polar_factor
from orthomerge.alignment.trained_maps import AlignedM, MomaOrthogonal, OrthM, divergence_gradient, excess, trained
from orthomerge.models.heads import Head
from orthomerge.testing.toys import HEADS, head_of, linear_head, pair_of, random, rotation

EYE = torch.eye(6)
SEES_A = linear_head(EYE)  # its aligned weight is A
PAIR = pair_of(random(20, 6), random(20, 6, seed=1))
every_head = pytest.mark.parametrize("kind", HEADS)


def test_divergence_by_hand() -> None:
    # q = (1/2, 1/4, 1/4) and p = (1/3, 1/3, 1/3): log 3 - H(q) = log 3 - 1.5 log 2; the other input agrees.
    teacher, student = torch.tensor([[math.log(2), 0, 0], [1.0, 2, 3]]), torch.tensor([[5.0, 5, 5], [2.0, 3, 4]])
    problem = Problem.of(pair_of(student, teacher), linear_head(torch.eye(3)))
    assert problem.divergence(student) == pytest.approx((math.log(3) - 1.5 * math.log(2)) / 2)


def test_excess_by_hand() -> None:
    # Columns (1, 2) and (3, 0): lengths 5 and 9, product 3.
    assert excess(torch.tensor([[1.0, 3.0], [2.0, 0.0]])).tolist() == [[4, 3], [3, 8]]


def mapped_divergence(problem: Problem, M: torch.Tensor) -> torch.Tensor:
    """Eq. 7 as printed."""
    whole, H, T = replace(problem.head, normalise=False), problem.H.float(), problem.T.float()
    return kl_div(whole(H @ M.T).log_softmax(1), whole(T).softmax(1), reduction="batchmean")


@every_head
def test_equation_7(kind: str) -> None:
    problem = Problem.of(PAIR, head_of(kind))
    M = EYE.clone().requires_grad_()
    (expected,) = by_autograd([M], lambda: mapped_divergence(problem, M), steps=25, lr=0.01)
    found = trained(AlignedM(25, 0.01, 20, False), problem, divergence_gradient(problem, "cpu"), name="")
    torch.testing.assert_close(found.float(), expected, atol=2e-5, rtol=0)


@every_head
def test_equation_9(kind: str) -> None:
    # Seven, an odd number: after a step of the same length in every entry, no entry of S is zero but for rounding.
    head, pair, eye = head_of(kind, d=7), pair_of(random(20, 7), random(20, 7, seed=1)), torch.eye(7)
    problem, M = Problem.of(pair, head), eye.clone().requires_grad_()
    (expected,) = by_autograd(
        [M], lambda: mapped_divergence(problem, M) + 0.02 * (M.T @ M - eye).abs().sum(), steps=15, lr=0.003
    )
    found = OrthM(alpha=0.02, steps=15, lr=0.003, batch=20, decay=False).fit(pair, head)
    wanted = replace(head, normalise=False)(problem.H.float() @ expected.T)
    torch.testing.assert_close(found.classifier(pair.merged.values), wanted, atol=1e-4, rtol=0)
    assert found.facts["defect"] == pytest.approx(float(excess(expected).norm()), rel=1e-3)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_equation_8(alpha: float) -> None:
    H, T = PAIR.merged.values, PAIR.expert.values
    A = EYE.clone().requires_grad_()

    def loss() -> torch.Tensor:
        distances = (H @ A.T - T).square().sum(1).sqrt()
        penalty: torch.Tensor = torch.linalg.norm(A.T @ A - EYE)
        return distances.mean() + alpha * penalty

    (expected,) = by_autograd([A], loss, steps=25, lr=0.003)
    options = MomaOrthogonal(alpha=alpha, steps=25, lr=0.003, batch=20, decay=False, project=False)
    found = options.fit(PAIR, SEES_A)
    torch.testing.assert_close(weight_of(found.classifier), expected, atol=2e-5, rtol=0)
    assert found.facts["loss_before"] == pytest.approx(float((H - T).norm(dim=1).mean()), rel=1e-5)
    assert found.facts["loss"] == pytest.approx(float((H @ expected.T - T).norm(dim=1).mean()), rel=1e-4)
    assert found.facts["defect"] == pytest.approx(float((expected.T @ expected - EYE).norm()), rel=1e-3)
    assert float(found.facts["loss"]) < float(found.facts["loss_before"])


@every_head
def test_folding_is_exact_by_aligned_m(kind: str) -> None:
    head, options = head_of(kind), AlignedM(steps=50, lr=0.02, batch=8)
    found = options.fit(PAIR, head)
    problem = Problem.of(PAIR, head)
    M = trained(options, problem, divergence_gradient(problem, "cpu"), name="")
    assert float((M - EYE).norm()) > 0.3
    composed = logits_from(head, problem.H @ M.T)
    torch.testing.assert_close(found.classifier(PAIR.merged.values).double(), composed, atol=1e-5, rtol=0)
    assert found.facts["loss"] == pytest.approx(problem.divergence(composed), rel=1e-6)
    assert found.facts["loss_before"] == pytest.approx(problem.divergence(logits_from(head, problem.H)), rel=1e-6)
    assert float(found.facts["loss"]) < 0.8 * float(found.facts["loss_before"])


@every_head
@pytest.mark.parametrize("project", [False, True])
def test_folding_is_exact(kind: str, project: bool) -> None:
    """The matrix does not depend on the head but for what the head reads."""
    head, pair = head_of(kind), pair_of(random(40, 6), random(40, 6, seed=1))
    options = MomaOrthogonal(steps=30, lr=0.01, project=project)
    A = weight_of(options.fit(pair, linear_head(EYE, normalise=head.normalise)).classifier).double()
    found = head_in(options.fit(pair, head).classifier)
    composed = logits_from(head, Problem.of(pair, head).H @ A.T)
    torch.testing.assert_close(found(pair.merged.values).double(), composed, atol=1e-5, rtol=0)


def test_starts_and_an_encoder_that_did_not_change() -> None:
    head = head_of("plain")
    assert torch.equal(weight_of(AlignedM(steps=1, lr=1e-30).fit(PAIR, head).classifier), head.output.weight)
    one = OrthM(alpha=0, steps=20, lr=0.01, batch=8).fit(PAIR, head)
    other = AlignedM(steps=20, lr=0.01, batch=8).fit(PAIR, head)
    assert torch.equal(weight_of(one.classifier), weight_of(other.classifier))
    assert one.facts["loss"] == other.facts["loss"]
    # All distances are zero: the gradient is zero at the kinks, not NaN.
    merged = random(40, 6)
    found = MomaOrthogonal(steps=20).fit(pair_of(merged, merged.clone()), head)
    torch.testing.assert_close(weight_of(found.classifier), head.output.weight, atol=1e-6, rtol=0)
    assert found.facts["defect"] == 0


def eleven(*, scale: float, normalise: bool, biased: bool = False) -> Head:
    """Eleven classes see all of six features, so that the outputs leave nothing of M open."""
    bias = random(11, seed=4) if biased else None
    return linear_head(random(11, 6, seed=3) * (scale if normalise else 1), bias, normalise=normalise)


@pytest.mark.parametrize("normalise", [False, True])
def test_a_planted_map_is_found_by_aligned_m(normalise: bool) -> None:
    expert, A = random(400, 6), rotation(6)
    head = eleven(scale=4, normalise=normalise, biased=not normalise)
    weight = head.output.weight
    found = AlignedM(steps=600, lr=0.01).fit(pair_of(expert @ A, expert), head)  # A (A^T t) = t
    assert float(found.facts["loss"]) < 1e-3 * float(found.facts["loss_before"])
    assert (weight_of(found.classifier) - weight @ A).norm() < 0.1 * (weight - weight @ A).norm()


@pytest.mark.parametrize("project", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
def test_a_planted_rotation_is_procrustes_by_orth_m(project: bool, normalise: bool) -> None:
    expert, A = random(400, 6), rotation(6)
    pair, head = pair_of(expert @ A + 0.05 * random(400, 6, seed=5), expert), eleven(scale=3, normalise=normalise)
    problem, weight = Problem.of(pair, head), head.output.weight
    procrustes = polar_factor(problem.T.T @ problem.H, task="toy").float()
    found = OrthM(lr=0.01, steps=600, project=project).fit(pair, head)
    assert float(found.facts["loss"]) < 0.02 * float(found.facts["loss_before"])
    assert float(found.facts["defect"]) < 0.01
    assert (weight - weight @ procrustes).abs().max() > 1
    near = 0.06 * (3 if normalise else 1)
    torch.testing.assert_close(weight_of(found.classifier), weight @ procrustes, atol=near, rtol=0)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_a_planted_rotation_is_procrustes(noise: float) -> None:
    expert, A = 3 * random(400, 6), rotation(6)
    merged = expert @ A + noise * random(400, 6, seed=5)
    procrustes = polar_factor((expert.T @ merged).double(), task="toy").float()
    assert (procrustes - EYE).norm() > 1
    found = MomaOrthogonal(lr=0.01, steps=600).fit(pair_of(merged, expert), SEES_A)
    torch.testing.assert_close(weight_of(found.classifier), procrustes, atol=0.02, rtol=0)
    least = float((merged @ procrustes.T - expert).norm(dim=1).mean())
    assert float(found.facts["loss"]) == pytest.approx(least, abs=0.03)


# The expert's features are twice as long, which no orthogonal matrix can bring back.
MERGED = random(300, 6)
TURNED_AND_LONGER, LONGER = pair_of(MERGED, 2 * MERGED @ rotation(6).T), pair_of(MERGED, 2 * MERGED)


def test_alpha_holds_the_matrix_near_the_orthogonal_ones_by_orth_m() -> None:
    found = {alpha: OrthM(alpha=alpha, lr=0.01, steps=400).fit(TURNED_AND_LONGER, SEES_A) for alpha in (0.0, 0.01, 0.1)}
    defects = [float(alignment.facts["defect"]) for alignment in found.values()]
    assert defects[0] > 4 > defects[1] > 1 > 0.01 > defects[2]
    for alignment, defect in zip(found.values(), defects, strict=True):
        assert float(excess(weight_of(alignment.classifier).double()).norm()) == pytest.approx(defect, abs=1e-5)
    assert float(found[0.1].facts["loss"]) < 0.5 * float(found[0.1].facts["loss_before"])


def test_alpha_holds_the_matrix_near_the_orthogonal_ones() -> None:
    free, held = (
        MomaOrthogonal(alpha=alpha, lr=0.01, steps=400, project=False).fit(TURNED_AND_LONGER, SEES_A)
        for alpha in (0.0, 10.0)
    )
    assert float(free.facts["defect"]) == pytest.approx(3 * math.sqrt(6), rel=0.05)
    assert float(free.facts["loss"]) < 0.1
    assert float(held.facts["defect"]) < 0.05


@pytest.mark.parametrize(("aligner", "alpha"), [(OrthM, 1e-3), (MomaOrthogonal, 0.1)])
def test_projection_is_to_the_nearest_orthogonal_matrix_and_the_defect_is_that_of_before(
    aligner: type[OrthM] | type[MomaOrthogonal], alpha: float
) -> None:
    raw, projected = (
        aligner(alpha=alpha, lr=0.01, steps=200, project=project).fit(LONGER, SEES_A) for project in (False, True)
    )
    assert raw.facts["defect"] == projected.facts["defect"]
    assert float(raw.facts["defect"]) > 1
    M = weight_of(projected.classifier)
    torch.testing.assert_close(M.T @ M, EYE, atol=1e-6, rtol=0)
    nearest = polar_factor(weight_of(raw.classifier).double(), task="toy").float()
    torch.testing.assert_close(M, nearest, atol=1e-5, rtol=0)


def test_heads_that_normalise_see_unit_vectors_on_the_scale_of_the_features() -> None:
    merged, expert = 5 * random(40, 6), 3 * random(40, 6, seed=1)
    length = expert.norm(dim=1).mean()
    options = MomaOrthogonal(steps=40, lr=0.01, project=False)
    found = options.fit(pair_of(merged, expert), linear_head(EYE, normalise=True))
    same = options.fit(pair_of(length * normalize(merged, dim=1), length * normalize(expert, dim=1)), SEES_A)
    torch.testing.assert_close(weight_of(found.classifier), weight_of(same.classifier), atol=1e-5, rtol=0)
