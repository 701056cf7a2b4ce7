"""Iso-C against a naive oracle, by its theorems, and at its edges."""

import pytest
import torch
from tests.merging.matrices import merge, normal

from orthomerge.merging.iso import IsoC

SHAPES = [(1, 9, 9), (2, 24, 24), (3, 24, 60), (3, 60, 24), (5, 1, 7), (5, 7, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_the_authors_construction(shape: tuple[int, ...]) -> None:
    deltas = normal(*shape)
    U, s, Vh = torch.linalg.svd(deltas.double().sum(0), full_matrices=False)
    expected = U @ torch.diag(torch.full_like(s, float(s.mean()))) @ Vh
    torch.testing.assert_close(merge(IsoC(scale=1.0), deltas), expected.float(), atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(merge(IsoC(), deltas), 1.5 * expected.float(), atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_all_directions_are_equally_strong_and_the_nuclear_norm_stays(shape: tuple[int, ...]) -> None:
    deltas = normal(*shape)
    s = torch.linalg.svdvals(merge(IsoC(scale=1.0), deltas))
    torch.testing.assert_close(s, s.mean().expand_as(s))
    torch.testing.assert_close(s.sum(), torch.linalg.svdvals(deltas.sum(0)).sum())


def test_by_hand() -> None:
    # The sum is diag(5, -1): mean strength 3, signs kept.
    deltas = torch.stack([torch.diag(torch.tensor([3.0, 1.0])), torch.diag(torch.tensor([2.0, -2.0]))])
    torch.testing.assert_close(merge(IsoC(scale=1.0), deltas), torch.diag(torch.tensor([3.0, -3.0])))


def test_idempotent() -> None:
    once = merge(IsoC(scale=1.0), normal(3, 12, 20))
    torch.testing.assert_close(merge(IsoC(scale=1.0), once[None]), once)


def test_a_sum_of_low_rank_keeps_its_rank_and_nuclear_norm() -> None:
    deltas = torch.stack([normal(30, 2, seed=t) @ normal(2, 50, seed=9 - t) for t in range(2)])
    s = torch.linalg.svdvals(merge(IsoC(scale=1.0), deltas))
    torch.testing.assert_close(s[:4], s[0].expand(4))
    assert s[4] < 1e-6 * s[0]
    torch.testing.assert_close(s.sum(), torch.linalg.svdvals(deltas.sum(0)).sum())


def test_zero_and_cancelling_experts_give_zero() -> None:
    assert torch.equal(merge(IsoC(), torch.zeros(3, 8, 5)), torch.zeros(8, 5))
    tau = normal(8, 5)
    assert torch.equal(merge(IsoC(), torch.stack([tau, -tau])), torch.zeros(8, 5))
