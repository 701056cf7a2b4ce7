"""Moma-orthogonal against Eq. 8 written out for autograd, and against the closed form."""

from __future__ import annotations

import math

import pytest
import torch
from tests.alignment.toys import HEADS, by_autograd, head_of, linear_head, pair_of, random, rotation
from torch.nn.functional import normalize

from orthomerge.alignment.moma_orthogonal import MomaOrthogonal
from orthomerge.alignment.problem import Problem
from orthomerge.alignment.rigid import polar_factor
from orthomerge.models.heads import Head

SEES_A = linear_head(torch.eye(6))  # its aligned weight is A


def matrix(found: object) -> torch.Tensor:
    assert isinstance(found, Head)
    return found.output.weight


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
    plain = Head(head.output, head.labels, head.hidden, head.activation)
    torch.testing.assert_close(found(pair.merged.values), plain(x.float()), atol=1e-5, rtol=0)


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
