"""The divergence by hand, and its gradient in a head's inputs against autograd."""

from __future__ import annotations

import math

import pytest
import torch
from tests.alignment.toys import HEADS, head_of, random
from torch.nn.functional import normalize

from orthomerge.alignment.distillation import divergence, input_gradient, plain


def test_divergence_by_hand() -> None:
    # q = (1/2, 1/4, 1/4) and p = (1/3, 1/3, 1/3): log 3 - H(q) = log 3 - 1.5 log 2; the other input agrees.
    teacher, student = torch.tensor([[math.log(2), 0, 0], [1.0, 2, 3]]), torch.tensor([[5.0, 5, 5], [2.0, 3, 4]])
    assert divergence(teacher, student) == pytest.approx((math.log(3) - 1.5 * math.log(2)) / 2)


@pytest.mark.parametrize("kind", HEADS)
def test_gradient(kind: str) -> None:
    head, x, q = plain(head_of(kind)), random(7, 6).requires_grad_(), random(7, 3, seed=9).softmax(1)
    loss = (q * (q.log() - head(x).log_softmax(1))).sum(1).mean()
    (expected,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(input_gradient(head, x, q), expected)


@pytest.mark.parametrize("kind", HEADS)
def test_a_plain_head_reads_what_is_already_normalised(kind: str) -> None:
    head, f = head_of(kind), random(7, 6)
    assert torch.equal(plain(head)(normalize(f, dim=1) if head.normalise else f), head(f))
