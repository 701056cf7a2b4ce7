"""Aligned-m against Eq. 7 written out for autograd, folded exactly, and on maps that it must find."""

from __future__ import annotations

import pytest
import torch
from tests.alignment.toys import HEADS, by_autograd, head_of, linear_head, pair_of, random, rotation
from torch.nn.functional import kl_div

from orthomerge.alignment.aligned_m import AlignedM, train_matrix
from orthomerge.alignment.descent import Adam
from orthomerge.alignment.distillation import divergence, plain
from orthomerge.alignment.folding import logits_from
from orthomerge.alignment.problem import Problem
from orthomerge.models.heads import Head


@pytest.mark.parametrize("kind", HEADS)
def test_equation_7(kind: str) -> None:
    head, steps, lr = head_of(kind), 25, 0.01
    problem = Problem.of(pair_of(random(20, 6), random(20, 6, seed=1)), head)
    H, T, whole = problem.H.float(), problem.T.float(), plain(head)
    M = torch.eye(6, requires_grad=True)
    (expected,) = by_autograd(
        [M],
        lambda: kl_div(whole(H @ M.T).log_softmax(1), whole(T).softmax(1), reduction="batchmean"),
        steps=steps,
        lr=lr,
    )
    found = train_matrix(problem, Adam(steps, lr, 20, False, 0), device="cpu", name="")
    torch.testing.assert_close(found.float(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", HEADS)
def test_folding_is_exact(kind: str) -> None:
    head, pair = head_of(kind), pair_of(random(20, 6), random(20, 6, seed=1))
    options = AlignedM(steps=50, lr=0.02, batch=8)
    found = options.fit(pair, head)
    assert isinstance(found.classifier, Head)
    assert {name: tensor.shape for name, tensor in found.classifier.tensors().items()} == {
        name: tensor.shape for name, tensor in head.tensors().items()
    }
    problem = Problem.of(pair, head)
    M = train_matrix(problem, Adam(50, 0.02, 8, True, 0), device="cpu", name="")
    assert float((M - torch.eye(6)).norm()) > 0.3
    composed = logits_from(head, problem.H @ M.T)
    torch.testing.assert_close(found.classifier(pair.merged.values).double(), composed, atol=1e-5, rtol=0)
    assert found.facts["loss"] == pytest.approx(divergence(problem.Z, composed), rel=1e-6)
    assert found.facts["loss_before"] == pytest.approx(divergence(problem.Z, logits_from(head, problem.H)), rel=1e-6)
    assert float(found.facts["loss"]) < 0.8 * float(found.facts["loss_before"])


def test_it_starts_at_the_unaligned_model() -> None:
    head = head_of("plain")
    found = AlignedM(steps=1, lr=1e-30).fit(pair_of(random(9, 6), random(9, 6, seed=1)), head).classifier
    assert isinstance(found, Head)
    assert torch.equal(found.output.weight, head.output.weight)


@pytest.mark.parametrize("normalise", [False, True])
def test_a_planted_map_is_found(normalise: bool) -> None:
    """Eleven classes see all of six features, so that the outputs leave nothing of M open."""
    expert, A = random(400, 6), rotation(6)
    weight = random(11, 6, seed=3) * (4 if normalise else 1)
    head = linear_head(weight, None if normalise else random(11, seed=4), normalise=normalise)
    found = AlignedM(steps=600, lr=0.01).fit(pair_of(expert @ A, expert), head)  # A (A^T t) = t
    assert isinstance(found.classifier, Head)
    assert float(found.facts["loss"]) < 1e-3 * float(found.facts["loss_before"])
    assert (found.classifier.output.weight - weight @ A).norm() < 0.1 * (weight - weight @ A).norm()
