"""TSV-Merge, Iso-C, Iso-CTS and WUDI against naive oracles, by their theorems, and at their edges."""

from typing import Any

import pytest
import torch
from tests.merging.making import merge, normal

from orthomerge.core.errors import RecipeError
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


SHAPES = [(1, 9, 9), (2, 24, 24), (3, 24, 60), (3, 60, 24), (5, 1, 7), (5, 7, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_iso_c_is_the_authors_equally_strong_and_keeps_the_nuclear_norm(shape: tuple[int, ...]) -> None:
    deltas = normal(*shape)
    U, s, Vh = torch.linalg.svd(deltas.double().sum(0), full_matrices=False)
    expected = U @ torch.diag(torch.full_like(s, float(s.mean()))) @ Vh
    torch.testing.assert_close(merge(IsoC(scale=1.0), deltas), expected.float(), atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(merge(IsoC(), deltas), 1.5 * expected.float(), atol=1e-7, rtol=1e-5)
    s = torch.linalg.svdvals(merge(IsoC(scale=1.0), deltas))
    torch.testing.assert_close(s, s.mean().expand_as(s))
    torch.testing.assert_close(s.sum(), torch.linalg.svdvals(deltas.sum(0)).sum())


def test_iso_c_is_idempotent_and_keeps_a_low_rank_and_its_nuclear_norm() -> None:
    once = merge(IsoC(scale=1.0), normal(3, 12, 20))
    torch.testing.assert_close(merge(IsoC(scale=1.0), once[None]), once)
    deltas = torch.stack([normal(30, 2, seed=t) @ normal(2, 50, seed=9 - t) for t in range(2)])
    s = torch.linalg.svdvals(merge(IsoC(scale=1.0), deltas))
    torch.testing.assert_close(s[:4], s[0].expand(4))
    assert s[4] < 1e-6 * s[0]
    torch.testing.assert_close(s.sum(), torch.linalg.svdvals(deltas.sum(0)).sum())


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


def test_all_directions_are_equally_strong_and_a_low_rank_keeps_its_own() -> None:
    s = torch.linalg.svdvals(merge(IsoCts(), normal(3, 40, 60)))
    torch.testing.assert_close(s, s.mean().expand_as(s))
    # One expert of rank 2: the sum explains all of it, and what is left is rounding, not directions.
    tau = (normal(20, 2) @ normal(2, 30, seed=1))[None]
    torch.testing.assert_close(merge(IsoCts(), tau), merge(IsoC(), tau), atol=1e-8, rtol=1e-5)


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


def test_equal_experts_are_counted_once_and_unchanged_ones_disturb_nothing() -> None:
    tau = normal(10, 16)
    merged = merge(TsvM(), torch.stack([tau, tau]))
    U, s, Vh = torch.linalg.svd(tau, full_matrices=False)
    torch.testing.assert_close(merged, (U[:, :5] * s[:5]) @ Vh[:5], atol=1e-7, rtol=1e-5)
    deltas = normal(3, 12, 12)
    deltas[1] = 0
    two = torch.stack([deltas[0], deltas[2]])
    U, s, Vh = torch.linalg.svd(two)
    cut = (U[:, :, :4] * s[:, None, :4]) @ Vh[:, :4]  # a third of the rank each, as with three experts
    torch.testing.assert_close(merge(TsvM(), deltas), merge(TsvM(), cut), atol=1e-7, rtol=1e-5)


def loss(tau: torch.Tensor, deltas: torch.Tensor) -> torch.Tensor:
    """L as the paper prints it, in the precision of its arguments."""
    terms = [torch.square((tau - tau_t) @ tau_t.T).sum() / torch.square(tau_t).sum() for tau_t in deltas]
    return torch.stack(terms).sum()


def oracle(deltas: torch.Tensor, *, steps: int, lr: float) -> torch.Tensor:
    """The authors' loop: autograd on the literal loss, and torch.optim.Adam."""
    tau = torch.nn.Parameter(deltas.sum(0))
    adam = torch.optim.Adam([tau], lr=lr)
    for _ in range(steps):
        adam.zero_grad()
        torch.autograd.backward(loss(tau, deltas))
        adam.step()
    return tau.detach()


def low_rank(T: int, m: int, k: int, *, rank: int) -> torch.Tensor:
    return torch.stack([normal(m, rank, seed=t, scale=0.1) @ normal(rank, k, seed=50 + t) for t in range(T)])


CASES = {
    "square": normal(3, 32, 32),
    "tall": normal(2, 60, 20),
    "wide": normal(3, 20, 60),
    "very wide": normal(2, 6, 80),
    "low rank": low_rank(3, 40, 64, rank=4),
    "large": normal(3, 24, 24, scale=0.1),
    "tiny": normal(3, 24, 24, scale=1e-4),
    "one row": normal(3, 1, 9),
    "one column": normal(3, 9, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_autograd_and_torch_adam(name: str) -> None:
    deltas = CASES[name]
    got = merge(Wudi(), deltas)
    torch.testing.assert_close(got, oracle(deltas, steps=300, lr=1e-5), atol=1e-6, rtol=0)
    # In float64 the literal loop leaves no doubt which of the two is off.
    torch.testing.assert_close(got.double(), oracle(deltas.double(), steps=300, lr=1e-5), atol=1e-6, rtol=0)


def test_one_expert_is_returned_bit_for_bit_and_unchanged_ones_have_no_say() -> None:
    deltas = normal(1, 12, 20)
    assert torch.equal(merge(Wudi(), deltas), deltas[0])
    assert loss(merge(Wudi(), deltas), deltas) == 0
    deltas = normal(4, 10, 14)
    deltas[1] = deltas[3] = 0
    assert torch.equal(merge(Wudi(), deltas), merge(Wudi(), deltas[[0, 2]]))
    deltas[2] = 0
    assert torch.equal(merge(Wudi(), deltas), deltas[0])
    assert torch.equal(merge(Wudi(), torch.zeros(3, 5, 6)), torch.zeros(5, 6))


def test_the_loss_falls_and_elements_stay_near_the_sum() -> None:
    deltas = normal(4, 24, 24)
    losses = [float(loss(merge(Wudi(steps=steps), deltas), deltas)) for steps in (0, 30, 100, 300)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    assert torch.equal(merge(Wudi(steps=0), deltas), deltas.sum(0))
    deltas = normal(3, 16, 16)
    assert (merge(Wudi(), deltas) - deltas.sum(0)).abs().max() < 300 * 1e-5 * 1.1


def test_reaches_the_minimum_when_given_time() -> None:
    # tau G = C, solved directly.
    deltas = normal(2, 6, 6, scale=1.0).double()
    grams = [tau.T @ tau / tau.norm() ** 2 for tau in deltas]
    C = deltas[0] @ grams[0] + deltas[1] @ grams[1]
    best = torch.linalg.solve(grams[0] + grams[1], C, left=False)
    got = merge(Wudi(steps=3000, lr=1e-2), deltas.float())
    assert loss(got.double(), deltas) <= 1.001 * loss(best, deltas)


def test_experts_on_disjoint_inputs_are_added() -> None:
    # Each reads its own half of the inputs: the sum interferes with neither, L is zero, and nothing moves.
    deltas = torch.zeros(2, 8, 10)
    deltas[0, :, :5], deltas[1, :, 5:] = normal(8, 5), normal(8, 5, seed=1)
    torch.testing.assert_close(merge(Wudi(), deltas), deltas.sum(0), atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(4, 7), (4, 3, 2, 5, 5), (4, 1, 5, 6), (4,)])
def test_other_tensors_stay_or_get_the_scaled_mean(shape: tuple[int, ...]) -> None:
    deltas = normal(*shape)
    assert torch.equal(merge(Wudi(), deltas), torch.zeros(shape[1:]))
    torch.testing.assert_close(merge(Wudi(scale=2.0, rest="mean"), deltas), 2 * deltas.mean(0))


@pytest.mark.parametrize(
    "key", ["embeddings.word_embeddings.weight", "shared.weight", "positional_embedding", "visual.proj"]
)
def test_tables_and_bare_projections_are_no_linear_weights(key: str) -> None:
    deltas = normal(2, 9, 4)
    assert torch.equal(merge(Wudi(), deltas, key=key), torch.zeros(9, 4))
    assert torch.equal(merge(Wudi(rest="mean"), deltas, key=key), deltas.mean(0))


def test_the_scale_multiplies_what_was_found() -> None:
    deltas = CASES["low rank"]
    torch.testing.assert_close(merge(Wudi(steps=20, scale=0.5), deltas), merge(Wudi(steps=20), deltas) / 2)
