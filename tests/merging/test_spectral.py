"""TSV-Merge, Iso-C and Iso-CTS against naive oracles, by their theorems, and at their edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.merging.making import merge, normal

from orthomerge.core.errors import NumericalError, RecipeError
from orthomerge.merging.iso import IsoC, IsoCts
from orthomerge.merging.tsv_m import TsvM
from orthomerge.merging.wudi import Wudi

SPECTRAL = [TsvM, IsoC, IsoCts]


@pytest.mark.parametrize("cls", SPECTRAL)
@pytest.mark.parametrize("shape", [(4, 7), (4, 3, 2, 5, 5), (4, 1, 5, 6), (4,)])
def test_other_tensors_get_the_scaled_mean(cls: type[TsvM], shape: tuple[int, ...]) -> None:
    deltas = normal(*shape)
    torch.testing.assert_close(merge(cls(scale=2.0), deltas), 2 * deltas.mean(0))


@pytest.mark.parametrize("method", [TsvM(), IsoC(), IsoCts(), IsoCts(common=0.0), Wudi(steps=20)], ids=repr)
@pytest.mark.parametrize("shape", [(9, 4, 6), (9, 6, 4), (5, 1, 8), (5, 8, 1), (3, 1, 1)])
def test_more_experts_than_rank(method: TsvM, shape: tuple[int, ...]) -> None:
    merged = merge(method, normal(*shape))
    assert merged.shape == shape[1:]
    assert merged.isfinite().all()
    assert merged.any()
    assert merged.is_contiguous()


@pytest.mark.parametrize("method", [TsvM(), IsoC(), IsoCts(), IsoCts(common=0.4)], ids=repr)
def test_zero_low_rank_and_cancelling_experts(method: TsvM) -> None:
    for shape in ((20, 12), (8, 5)):
        assert torch.equal(merge(method, torch.zeros(3, *shape)), torch.zeros(shape))
    low = torch.stack([normal(20, 1, seed=t) @ normal(1, 30, seed=9 - t) for t in range(3)])
    assert merge(method, low).isfinite().all()
    tau = normal(8, 5)
    assert merge(method, torch.stack([tau, -tau])).isfinite().all()


REFUSED: list[tuple[type[Any], dict[str, Any], str]] = [
    *((cls, {"scale": float("nan")}, "'scale' must be a finite number, got nan") for cls in (*SPECTRAL, Wudi)),
    (IsoCts, {"common": 1.2}, r"'common' must be in \[0, 1\], got 1.2"),
    (Wudi, {"lr": float("inf")}, "'lr' must be positive, got inf"),
    (Wudi, {"lr": 0.0}, "'lr' must be positive, got 0"),
    (Wudi, {"steps": -1}, "'steps' must be at least 0, got -1"),
    (Wudi, {"rest": "means"}, "'rest' must be base or mean, got 'means'; did you mean 'mean'"),
]


@pytest.mark.parametrize(("cls", "options", "message"), REFUSED)
def test_options_that_are_refused(cls: type[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        cls(**options)


@pytest.mark.parametrize("method", [TsvM(), IsoC(), IsoCts()], ids=repr)
def test_what_is_not_finite_is_refused(method: TsvM) -> None:
    with pytest.raises(NumericalError, match=r"'layer\.0\.weight' must be finite"):
        merge(method, torch.full((2, 3, 3), float("nan")))


# By hand.


def diagonals(*rows: list[float]) -> torch.Tensor:
    return torch.stack([torch.diag(torch.tensor(row)) for row in rows])


@pytest.mark.parametrize(
    ("method", "deltas", "expected"),
    [
        # The sum is diag(5, -1): mean strength 3, signs kept.
        (IsoC(scale=1.0), diagonals([3.0, 1.0], [2.0, -2.0]), [3.0, -3.0]),
        # The sum, diag(2, 3, 5), gives its third axis; the rest is each expert's own: 10 / 3 all.
        (IsoCts(scale=1.0, common=0.4), diagonals([2.0, 0.0, 2.5], [0.0, 3.0, 2.5]), [10 / 3] * 3),
        # Rank 2 shared by two experts: each keeps its larger axis; the axes are orthogonal already.
        (TsvM(), diagonals([3.0, 1.0], [1.0, 2.0]), [3.0, 2.0]),
    ],
)
def test_by_hand(method: TsvM, deltas: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(merge(method, deltas), torch.diag(torch.tensor(expected)))


# Iso-C and Iso-CTS.


SHAPES = [(1, 9, 9), (2, 24, 24), (3, 24, 60), (3, 60, 24), (5, 1, 7), (5, 7, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_iso_c_agrees_with_the_authors_construction(shape: tuple[int, ...]) -> None:
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


def test_iso_c_is_idempotent() -> None:
    once = merge(IsoC(scale=1.0), normal(3, 12, 20))
    torch.testing.assert_close(merge(IsoC(scale=1.0), once[None]), once)


def test_a_sum_of_low_rank_keeps_its_rank_and_nuclear_norm() -> None:
    deltas = torch.stack([normal(30, 2, seed=t) @ normal(2, 50, seed=9 - t) for t in range(2)])
    s = torch.linalg.svdvals(merge(IsoC(scale=1.0), deltas))
    torch.testing.assert_close(s[:4], s[0].expand(4))
    assert s[4] < 1e-6 * s[0]
    torch.testing.assert_close(s.sum(), torch.linalg.svdvals(deltas.sum(0)).sum())


def test_cancelling_experts_give_zero() -> None:
    tau = normal(8, 5)
    assert torch.equal(merge(IsoC(), torch.stack([tau, -tau])), torch.zeros(8, 5))


def iso_cts(deltas: torch.Tensor, *, common: float) -> torch.Tensor:
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
    expected = iso_cts(deltas, common=common)
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


def test_low_rank_experts_keep_their_directions() -> None:
    # One expert of rank 2: the sum explains all of it, and what is left is rounding, not directions.
    tau = (normal(20, 2) @ normal(2, 30, seed=1))[None]
    torch.testing.assert_close(merge(IsoCts(), tau), merge(IsoC(), tau), atol=1e-8, rtol=1e-5)


# TSV-Merge.


def tsv(deltas: torch.Tensor) -> torch.Tensor:
    """The authors' construction, step by step: zero-padded slots, two more decompositions, one product."""
    T, m, k = deltas.shape
    r = min(m, k)
    n = r // T
    U_all, s_all, V_all = (torch.zeros(size, dtype=torch.float64) for size in ((m, r), (r,), (r, k)))
    for t in range(T):
        U, s, Vh = torch.linalg.svd(deltas[t].double(), full_matrices=False)
        U_all[:, t * n : (t + 1) * n] = U[:, :n]
        s_all[t * n : (t + 1) * n] = s[:n]
        V_all[t * n : (t + 1) * n] = Vh[:n]
    P, _, Qh = torch.linalg.svd(U_all, full_matrices=False)
    A, _, Bh = torch.linalg.svd(V_all, full_matrices=False)
    merged: torch.Tensor = P @ Qh @ torch.diag(s_all) @ A @ Bh
    return merged.float()


@pytest.mark.parametrize("shape", [(2, 24, 24), (3, 24, 60), (3, 60, 24), (5, 23, 31), (8, 16, 90)])
def test_tsv_m_agrees_with_the_authors_construction(shape: tuple[int, ...]) -> None:
    deltas = normal(*shape)
    torch.testing.assert_close(merge(TsvM(), deltas), tsv(deltas), atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("shape", [(1, 12, 20), (1, 7), (1, 2, 3, 3, 3), (1,)])
def test_one_expert_is_returned_bit_for_bit(shape: tuple[int, ...]) -> None:
    deltas = normal(*shape)
    assert torch.equal(merge(TsvM(), deltas), deltas[0])


@pytest.mark.parametrize("shape", [(40, 40), (30, 60), (100, 30)])
def test_experts_that_do_not_interfere_are_added(shape: tuple[int, int]) -> None:
    # Three experts of rank 4, disjoint subspaces, a share of 10 or more each: nothing to cut or to whiten.
    U = torch.linalg.qr(normal(shape[0], 12)).Q
    V = torch.linalg.qr(normal(shape[1], 12, seed=1)).Q
    s = torch.linspace(1, 2, 12)
    deltas = torch.stack([(U[:, p] * s[p]) @ V[:, p].T for p in (slice(0, 4), slice(4, 8), slice(8, 12))])
    torch.testing.assert_close(merge(TsvM(), deltas), deltas.sum(0), atol=1e-6, rtol=0)
    torch.testing.assert_close(merge(TsvM(scale=0.5), deltas), deltas.sum(0) / 2, atol=1e-6, rtol=0)


def test_singular_values_survive_the_whitening() -> None:
    deltas = normal(3, 30, 45)
    kept = torch.cat([torch.linalg.svdvals(tau)[:10] for tau in deltas]).sort(descending=True).values
    torch.testing.assert_close(torch.linalg.svdvals(merge(TsvM(), deltas)), kept)


def test_equal_experts_are_counted_once() -> None:
    tau = normal(10, 16)
    merged = merge(TsvM(), torch.stack([tau, tau]))
    U, s, Vh = torch.linalg.svd(tau, full_matrices=False)
    torch.testing.assert_close(merged, (U[:, :5] * s[:5]) @ Vh[:5], atol=1e-7, rtol=1e-5)


def test_an_expert_that_changed_nothing_disturbs_nothing() -> None:
    deltas = normal(3, 12, 12)
    deltas[1] = 0
    two = torch.stack([deltas[0], deltas[2]])
    U, s, Vh = (torch.linalg.svd(two)[i] for i in range(3))
    cut = (U[:, :, :4] * s[:, None, :4]) @ Vh[:, :4]  # a third of the rank each, as with three experts
    torch.testing.assert_close(merge(TsvM(), deltas), merge(TsvM(), cut), atol=1e-7, rtol=1e-5)
