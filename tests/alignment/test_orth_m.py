"""Orth-m against Eq. 9 written out for autograd, near orthogonal matrices, and against Procrustes."""

from __future__ import annotations

import pytest
import torch
from tests.alignment.toys import HEADS, by_autograd, head_of, linear_head, pair_of, random, rotation
from torch.nn.functional import kl_div

from orthomerge.alignment.aligned_m import AlignedM
from orthomerge.alignment.distillation import plain
from orthomerge.alignment.orth_m import OrthM, excess
from orthomerge.alignment.problem import Problem
from orthomerge.alignment.rigid import polar_factor
from orthomerge.models.heads import Head


def weight_of(found: object) -> torch.Tensor:
    assert isinstance(found, Head)
    return found.output.weight


@pytest.mark.parametrize("kind", HEADS)
def test_equation_9(kind: str) -> None:
    # Seven, an odd number: after a step of the same length in every entry, no entry of S is zero but for rounding.
    head, pair = head_of(kind, d=7), pair_of(random(20, 7), random(20, 7, seed=1))
    problem = Problem.of(pair, head)
    H, T, whole = problem.H.float(), problem.T.float(), plain(head)
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
    assert torch.equal(weight_of(one.classifier), weight_of(other.classifier))
    assert one.facts["loss"] == other.facts["loss"]


@pytest.mark.parametrize("project", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
def test_a_planted_rotation_is_procrustes(project: bool, normalise: bool) -> None:
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
        weight_of(found.classifier), weight @ procrustes, atol=0.06 * (3 if normalise else 1), rtol=0
    )


def test_alpha_holds_the_matrix_near_the_orthogonal_ones() -> None:
    """The expert's features are twice as long, which no orthogonal matrix can bring back."""
    merged = random(300, 6)
    pair, head = pair_of(merged, 2 * merged @ rotation(6).T), linear_head(torch.eye(6))  # so that the weight is M
    found = {alpha: OrthM(alpha=alpha, lr=0.01, steps=400).fit(pair, head) for alpha in (0.0, 0.01, 0.1)}
    defects = [float(alignment.facts["defect"]) for alignment in found.values()]
    assert defects[0] > 4 > defects[1] > 1 > 0.01 > defects[2]
    for alignment, defect in zip(found.values(), defects, strict=True):
        assert float(excess(weight_of(alignment.classifier).double()).norm()) == pytest.approx(defect, abs=1e-5)
    assert float(found[0.1].facts["loss"]) < 0.5 * float(found[0.1].facts["loss_before"])


def test_projection_is_orthogonal_and_the_defect_is_told_all_the_same() -> None:
    merged = random(300, 6)
    pair, head = pair_of(merged, 2 * merged), linear_head(torch.eye(6))
    raw, projected = (
        OrthM(alpha=1e-3, lr=0.01, steps=200, project=project).fit(pair, head) for project in (False, True)
    )
    assert raw.facts["defect"] == projected.facts["defect"]
    assert float(raw.facts["defect"]) > 1
    M = weight_of(projected.classifier)
    torch.testing.assert_close(M.T @ M, torch.eye(6), atol=1e-6, rtol=0)
    nearest = polar_factor(weight_of(raw.classifier).double(), task="toy").float()
    torch.testing.assert_close(M, nearest, atol=1e-5, rtol=0)
