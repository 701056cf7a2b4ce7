"""Iso-C and Iso-CTS against naive oracles, by their theorems, and at their edges."""

from __future__ import annotations

import pytest
import torch
from tests.merging.matrices import merge, normal

from orthomerge.merging.iso import IsoC, IsoCts

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


def oracle(deltas: torch.Tensor, *, common: float) -> torch.Tensor:
    """The authors' construction, step by step, at scale 1."""
    taus = deltas.double()
    T, m, k = deltas.shape
    r = min(m, k)
    specific = round((r - int(r * common)) / T) * T
    c, n = r - specific, specific // T
    U, s, Vh = torch.linalg.svd(taus.sum(0), full_matrices=False)
    U_c = U[:, :c]
    lefts, strengths, rights = [], [], []
    for tau in taus:
        U_t, s_t, Vh_t = torch.linalg.svd(tau - U_c @ U_c.T @ tau, full_matrices=False)
        lefts.append(U_t[:, :n])
        strengths.append(s_t[:n])
        rights.append(Vh_t[:n])
    P, _, Qh = torch.linalg.svd(torch.cat([*lefts, U_c], 1), full_matrices=False)
    A, _, Bh = torch.linalg.svd(torch.cat([*rights, Vh[:c]]), full_matrices=False)
    mean = torch.cat([*strengths, s[:c]]).mean()
    merged: torch.Tensor = mean * (P @ Qh @ A @ Bh)
    return merged.float()


@pytest.mark.parametrize("common", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("shape", [(2, 24, 24), (3, 24, 60), (3, 60, 24), (5, 22, 31), (8, 40, 90)])
def test_cts_agrees_with_the_authors_construction(shape: tuple[int, ...], common: float) -> None:
    deltas = normal(*shape)
    expected = oracle(deltas, common=common)
    got = merge(IsoCts(scale=1.0, common=common), deltas)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(merge(IsoCts(common=common), deltas), 1.5 * got)


@pytest.mark.parametrize(
    ("r", "T", "common", "expected"),
    [
        (768, 8, 0.8, (616, 19)),  # 614 common, 154 left, 19.25 each
        (768, 3, 0.8, (615, 51)),
        (10, 3, 1.0, (10, 0)),
        (10, 3, 0.0, (1, 3)),
        (4, 7, 0.1, (4, 0)),  # rounding up would ask for 7 of 4
        (5, 3, 0.0, (2, 1)),
        (2, 9, 0.8, (2, 0)),
    ],
)
def test_directions_are_shared_out(r: int, T: int, common: float, expected: tuple[int, int]) -> None:
    assert IsoCts(common=common).split(r, T) == expected


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (12, 12)])
def test_one_expert_or_nothing_specific_is_iso_c(shape: tuple[int, int]) -> None:
    one, three = normal(1, *shape), normal(3, *shape)
    torch.testing.assert_close(merge(IsoCts(), one), merge(IsoC(), one), atol=1e-7, rtol=1e-5)
    assert torch.equal(merge(IsoCts(common=1.0), three), merge(IsoC(), three))


def test_all_directions_are_equally_strong() -> None:
    s = torch.linalg.svdvals(merge(IsoCts(), normal(3, 40, 60)))
    torch.testing.assert_close(s, s.mean().expand_as(s))


def test_cts_by_hand() -> None:
    # The sum, diag(2, 3, 5), gives its third axis; the rest is each expert's own: 10 / 3 all.
    deltas = torch.zeros(2, 3, 3)
    deltas[0].diagonal().copy_(torch.tensor([2.0, 0.0, 2.5]))
    deltas[1].diagonal().copy_(torch.tensor([0.0, 3.0, 2.5]))
    got = merge(IsoCts(scale=1.0, common=0.4), deltas)
    torch.testing.assert_close(got, torch.eye(3) * 10 / 3)


def test_low_rank_experts_keep_their_directions() -> None:
    # One expert of rank 2: the sum explains all of it, and what is left is rounding, not directions.
    tau = (normal(20, 2) @ normal(2, 30, seed=1))[None]
    torch.testing.assert_close(merge(IsoCts(), tau), merge(IsoC(), tau), atol=1e-8, rtol=1e-5)
    low = torch.stack([normal(20, 1, seed=t) @ normal(1, 30, seed=9 - t) for t in range(3)])
    assert merge(IsoCts(), low).isfinite().all()
