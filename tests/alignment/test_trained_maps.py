"""Trained maps against Eq. 7, 8 and 9 written out for autograd, folded exactly, and beside Procrustes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.alignment.toys import by_autograd
from torch.nn.functional import kl_div, normalize

from orthomerge.alignment.folding import logits_from
from orthomerge.alignment.problem import Problem
from orthomerge.alignment.rigid import polar_factor
from orthomerge.alignment.trained_maps import (
    AlignedM,
    MomaOrthogonal,
    OrthM,
    divergence_gradient,
    excess,
    input_gradient,
    trained,
)
from orthomerge.models.heads import Head
from orthomerge.testing.toys import HEADS, head_of, linear_head, pair_of, random, rotation

SEES_A = linear_head(torch.eye(6))  # its aligned weight is A


def matrix(classifier: object) -> torch.Tensor:
    assert isinstance(classifier, Head)
    return classifier.output.weight


def test_divergence_by_hand() -> None:
    # q = (1/2, 1/4, 1/4) and p = (1/3, 1/3, 1/3): log 3 - H(q) = log 3 - 1.5 log 2; the other input agrees.
    teacher, student = torch.tensor([[math.log(2), 0, 0], [1.0, 2, 3]]), torch.tensor([[5.0, 5, 5], [2.0, 3, 4]])
    problem = Problem.of(pair_of(student, teacher), linear_head(torch.eye(3)))
    assert problem.divergence(student) == pytest.approx((math.log(3) - 1.5 * math.log(2)) / 2)


@pytest.mark.parametrize("kind", HEADS)
def test_the_gradient_in_a_heads_inputs(kind: str) -> None:
    head = replace(head_of(kind), normalise=False)
    x, q = random(7, 6).requires_grad_(), random(7, 3, seed=9).softmax(1)
    loss = (q * (q.log() - head(x).log_softmax(1))).sum(1).mean()
    (expected,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(input_gradient(head, x, q), expected)


@pytest.mark.parametrize("kind", HEADS)
def test_equation_7(kind: str) -> None:
    head, steps, lr = head_of(kind), 25, 0.01
    problem = Problem.of(pair_of(random(20, 6), random(20, 6, seed=1)), head)
    H, T, whole = problem.H.float(), problem.T.float(), replace(head, normalise=False)
    M = torch.eye(6, requires_grad=True)
    (expected,) = by_autograd(
        [M],
        lambda: kl_div(whole(H @ M.T).log_softmax(1), whole(T).softmax(1), reduction="batchmean"),
        steps=steps,
        lr=lr,
    )
    found = trained(AlignedM(steps, lr, 20, False), problem, divergence_gradient(problem, "cpu"), name="")
    torch.testing.assert_close(found.float(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", HEADS)
def test_folding_is_exact_by_aligned_m(kind: str) -> None:
    head, pair = head_of(kind), pair_of(random(20, 6), random(20, 6, seed=1))
    options = AlignedM(steps=50, lr=0.02, batch=8)
    found = options.fit(pair, head)
    assert isinstance(found.classifier, Head)
    assert {name: tensor.shape for name, tensor in found.classifier.tensors().items()} == {
        name: tensor.shape for name, tensor in head.tensors().items()
    }
    problem = Problem.of(pair, head)
    M = trained(options, problem, divergence_gradient(problem, "cpu"), name="")
    assert float((M - torch.eye(6)).norm()) > 0.3
    composed = logits_from(head, problem.H @ M.T)
    torch.testing.assert_close(found.classifier(pair.merged.values).double(), composed, atol=1e-5, rtol=0)
    assert found.facts["loss"] == pytest.approx(problem.divergence(composed), rel=1e-6)
    assert found.facts["loss_before"] == pytest.approx(problem.divergence(logits_from(head, problem.H)), rel=1e-6)
    assert float(found.facts["loss"]) < 0.8 * float(found.facts["loss_before"])


def test_it_starts_at_the_unaligned_model_by_aligned_m() -> None:
    head = head_of("plain")
    found = AlignedM(steps=1, lr=1e-30).fit(pair_of(random(9, 6), random(9, 6, seed=1)), head).classifier
    assert isinstance(found, Head)
    assert torch.equal(found.output.weight, head.output.weight)


@pytest.mark.parametrize("normalise", [False, True])
def test_a_planted_map_is_found_by_aligned_m(normalise: bool) -> None:
    """Eleven classes see all of six features, so that the outputs leave nothing of M open."""
    expert, A = random(400, 6), rotation(6)
    weight = random(11, 6, seed=3) * (4 if normalise else 1)
    head = linear_head(weight, None if normalise else random(11, seed=4), normalise=normalise)
    found = AlignedM(steps=600, lr=0.01).fit(pair_of(expert @ A, expert), head)  # A (A^T t) = t
    assert isinstance(found.classifier, Head)
    assert float(found.facts["loss"]) < 1e-3 * float(found.facts["loss_before"])
    assert (found.classifier.output.weight - weight @ A).norm() < 0.1 * (weight - weight @ A).norm()


@pytest.mark.parametrize("kind", HEADS)
def test_equation_9(kind: str) -> None:
    # Seven, an odd number: after a step of the same length in every entry, no entry of S is zero but for rounding.
    head, pair = head_of(kind, d=7), pair_of(random(20, 7), random(20, 7, seed=1))
    problem = Problem.of(pair, head)
    H, T, whole = problem.H.float(), problem.T.float(), replace(head, normalise=False)
    M = torch.eye(7, requires_grad=True)

    def loss() -> torch.Tensor:
        fit = kl_div(whole(H @ M.T).log_softmax(1), whole(T).softmax(1), reduction="batchmean")
        return fit + 0.02 * (M.T @ M - torch.eye(7)).abs().sum()

    (expected,) = by_autograd([M], loss, steps=15, lr=0.003)
    found = OrthM(alpha=0.02, steps=15, lr=0.003, batch=20, decay=False).fit(pair, head)
    torch.testing.assert_close(
        found.classifier(pair.merged.values),
        whole(H @ expected.T),
        atol=1e-4,
        rtol=0,
    )
    assert found.facts["defect"] == pytest.approx(float(excess(expected).norm()), rel=1e-3)


def test_excess_by_hand() -> None:
    # Columns (1, 2) and (3, 0): lengths 5 and 9, product 3.
    assert excess(torch.tensor([[1.0, 3.0], [2.0, 0.0]])).tolist() == [[4, 3], [3, 8]]


def test_without_a_penalty_it_is_aligned_m() -> None:
    pair, head = pair_of(random(40, 6), random(40, 6, seed=1)), head_of("plain")
    one = OrthM(alpha=0, steps=20, lr=0.01, batch=8).fit(pair, head)
    other = AlignedM(steps=20, lr=0.01, batch=8).fit(pair, head)
    assert torch.equal(matrix(one.classifier), matrix(other.classifier))
    assert one.facts["loss"] == other.facts["loss"]


@pytest.mark.parametrize("project", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
def test_a_planted_rotation_is_procrustes_by_orth_m(project: bool, normalise: bool) -> None:
    expert, A = random(400, 6), rotation(6)
    merged = expert @ A + 0.05 * random(400, 6, seed=5)
    weight = random(11, 6, seed=3) * (3 if normalise else 1)
    pair, head = pair_of(merged, expert), linear_head(weight, normalise=normalise)
    problem = Problem.of(pair, head)
    procrustes = polar_factor(problem.T.T @ problem.H, task="toy").float()
    found = OrthM(lr=0.01, steps=600, project=project).fit(pair, head)
    assert float(found.facts["loss"]) < 0.02 * float(found.facts["loss_before"])
    assert float(found.facts["defect"]) < 0.01
    assert (weight - weight @ procrustes).abs().max() > 1
    torch.testing.assert_close(
        matrix(found.classifier), weight @ procrustes, atol=0.06 * (3 if normalise else 1), rtol=0
    )


def test_alpha_holds_the_matrix_near_the_orthogonal_ones_by_orth_m() -> None:
    """The expert's features are twice as long, which no orthogonal matrix can bring back."""
    merged = random(300, 6)
    pair, head = pair_of(merged, 2 * merged @ rotation(6).T), linear_head(torch.eye(6))  # so that the weight is M
    found = {alpha: OrthM(alpha=alpha, lr=0.01, steps=400).fit(pair, head) for alpha in (0.0, 0.01, 0.1)}
    defects = [float(alignment.facts["defect"]) for alignment in found.values()]
    assert defects[0] > 4 > defects[1] > 1 > 0.01 > defects[2]
    for alignment, defect in zip(found.values(), defects, strict=True):
        assert float(excess(matrix(alignment.classifier).double()).norm()) == pytest.approx(defect, abs=1e-5)
    assert float(found[0.1].facts["loss"]) < 0.5 * float(found[0.1].facts["loss_before"])


def test_projection_is_orthogonal_and_the_defect_is_told_all_the_same_by_orth_m() -> None:
    merged = random(300, 6)
    pair, head = pair_of(merged, 2 * merged), linear_head(torch.eye(6))
    raw, projected = (
        OrthM(alpha=1e-3, lr=0.01, steps=200, project=project).fit(pair, head) for project in (False, True)
    )
    assert raw.facts["defect"] == projected.facts["defect"]
    assert float(raw.facts["defect"]) > 1
    M = matrix(projected.classifier)
    torch.testing.assert_close(M.T @ M, torch.eye(6), atol=1e-6, rtol=0)
    nearest = polar_factor(matrix(raw.classifier).double(), task="toy").float()
    torch.testing.assert_close(M, nearest, atol=1e-5, rtol=0)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_equation_8(alpha: float) -> None:
    H, T = random(20, 6), random(20, 6, seed=1)
    A = torch.eye(6, requires_grad=True)

    def loss() -> torch.Tensor:
        distances = (H @ A.T - T).square().sum(1).sqrt()
        penalty: torch.Tensor = torch.linalg.norm(A.T @ A - torch.eye(6))
        return distances.mean() + alpha * penalty

    (expected,) = by_autograd([A], loss, steps=25, lr=0.003)
    options = MomaOrthogonal(alpha=alpha, steps=25, lr=0.003, batch=20, decay=False, project=False)
    found = options.fit(pair_of(H, T), SEES_A)
    torch.testing.assert_close(matrix(found.classifier), expected, atol=2e-5, rtol=0)
    assert found.facts["loss_before"] == pytest.approx(float((H - T).norm(dim=1).mean()), rel=1e-5)
    assert found.facts["loss"] == pytest.approx(float((H @ expected.T - T).norm(dim=1).mean()), rel=1e-4)
    assert found.facts["defect"] == pytest.approx(float((expected.T @ expected - torch.eye(6)).norm()), rel=1e-3)
    assert float(found.facts["loss"]) < float(found.facts["loss_before"])


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("project", [False, True])
def test_folding_is_exact(kind: str, project: bool) -> None:
    """The matrix does not depend on the head but for what the head reads."""
    head, pair = head_of(kind), pair_of(random(40, 6), random(40, 6, seed=1))
    options = MomaOrthogonal(steps=30, lr=0.01, project=project)
    A = matrix(options.fit(pair, linear_head(torch.eye(6), normalise=head.normalise)).classifier).double()
    found = options.fit(pair, head).classifier
    assert isinstance(found, Head)
    x = Problem.of(pair, head).H @ A.T
    whole = replace(head, normalise=False)
    torch.testing.assert_close(found(pair.merged.values), whole(x.float()), atol=1e-5, rtol=0)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_a_planted_rotation_is_procrustes(noise: float) -> None:
    expert, A = 3 * random(400, 6), rotation(6)
    merged = expert @ A + noise * random(400, 6, seed=5)
    procrustes = polar_factor((expert.T @ merged).double(), task="toy").float()
    assert (procrustes - torch.eye(6)).norm() > 1
    found = MomaOrthogonal(lr=0.01, steps=600).fit(pair_of(merged, expert), SEES_A)
    torch.testing.assert_close(matrix(found.classifier), procrustes, atol=0.02, rtol=0)
    least = float((merged @ procrustes.T - expert).norm(dim=1).mean())
    assert float(found.facts["loss"]) == pytest.approx(least, abs=0.03)


def test_alpha_holds_the_matrix_near_the_orthogonal_ones() -> None:
    """The expert's features are twice as long, which no orthogonal matrix can bring back."""
    merged = random(300, 6)
    pair = pair_of(merged, 2 * merged @ rotation(6).T)
    free, held = (
        MomaOrthogonal(alpha=alpha, lr=0.01, steps=400, project=False).fit(pair, SEES_A) for alpha in (0.0, 10.0)
    )
    assert float(free.facts["defect"]) == pytest.approx(3 * math.sqrt(6), rel=0.05)
    assert float(free.facts["loss"]) < 0.1
    assert float(held.facts["defect"]) < 0.05


def test_projection_is_orthogonal_and_the_defect_is_told_all_the_same() -> None:
    merged = random(300, 6)
    pair = pair_of(merged, 2 * merged)
    raw, projected = (
        MomaOrthogonal(alpha=0.1, lr=0.01, steps=200, project=project).fit(pair, SEES_A) for project in (False, True)
    )
    assert raw.facts["defect"] == projected.facts["defect"]
    assert float(raw.facts["defect"]) > 1
    A = matrix(projected.classifier)
    torch.testing.assert_close(A.T @ A, torch.eye(6), atol=1e-6, rtol=0)


def test_heads_that_normalise_see_unit_vectors_on_the_scale_of_the_features() -> None:
    merged, expert = 5 * random(40, 6), 3 * random(40, 6, seed=1)
    length = expert.norm(dim=1).mean()
    options = MomaOrthogonal(steps=40, lr=0.01, project=False)
    found = options.fit(pair_of(merged, expert), linear_head(torch.eye(6), normalise=True))
    same = options.fit(pair_of(length * normalize(merged, dim=1), length * normalize(expert, dim=1)), SEES_A)
    torch.testing.assert_close(matrix(found.classifier), matrix(same.classifier), atol=1e-5, rtol=0)


def test_an_encoder_that_did_not_change_stays_as_it_is() -> None:
    """All distances are zero: the gradient is zero at the kinks, not NaN."""
    merged, head = random(40, 6), head_of("plain")
    found = MomaOrthogonal(steps=20).fit(pair_of(merged, merged.clone()), head)
    torch.testing.assert_close(matrix(found.classifier), head.output.weight, atol=1e-6, rtol=0)
    assert found.facts["defect"] == 0
