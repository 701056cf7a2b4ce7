"""TSV-Merge against a naive oracle, by its theorems, and at its edges."""

import pytest
import torch

from orthomerge.core.errors import NumericalError, RecipeError
from orthomerge.merging.kinds import Site
from orthomerge.merging.tsv_m import TsvM


def normal(*shape: int, seed: int = 0, scale: float = 1e-2) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def merge(method: TsvM, deltas: torch.Tensor, *, key: str = "layer.0.weight") -> torch.Tensor:
    shape = tuple(deltas.shape[1:])
    return method.merge(torch.ones(shape), deltas, site=Site(key, shape, 0, tuple(map(str, range(len(deltas))))))


def oracle(deltas: torch.Tensor) -> torch.Tensor:
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
def test_agrees_with_the_authors_construction(shape: tuple[int, ...]) -> None:
    deltas = normal(*shape)
    torch.testing.assert_close(merge(TsvM(), deltas), oracle(deltas), atol=1e-7, rtol=1e-5)


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


def test_by_hand() -> None:
    # Rank 2 shared by two experts: each keeps its larger axis; the axes are orthogonal already.
    deltas = torch.stack([torch.diag(torch.tensor([3.0, 1.0])), torch.diag(torch.tensor([1.0, 2.0]))])
    torch.testing.assert_close(merge(TsvM(), deltas), torch.diag(torch.tensor([3.0, 2.0])))


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


@pytest.mark.parametrize("shape", [(9, 4, 6), (9, 6, 4), (5, 1, 8), (5, 8, 1), (3, 1, 1)])
def test_more_experts_than_rank(shape: tuple[int, ...]) -> None:
    merged = merge(TsvM(), normal(*shape))
    assert merged.shape == shape[1:]
    assert merged.isfinite().all()
    assert merged.any()


def test_zero_and_low_rank_are_finite() -> None:
    assert torch.equal(merge(TsvM(), torch.zeros(3, 8, 5)), torch.zeros(8, 5))
    low = torch.stack([normal(20, 1, seed=t) @ normal(1, 30, seed=9 - t) for t in range(3)])
    assert merge(TsvM(), low).isfinite().all()


@pytest.mark.parametrize("shape", [(4, 7), (4, 3, 2, 5, 5), (4, 1, 5, 6), (4,)])
def test_other_tensors_get_the_scaled_mean(shape: tuple[int, ...]) -> None:
    deltas = normal(*shape)
    torch.testing.assert_close(merge(TsvM(scale=2.0), deltas), 2 * deltas.mean(0))


def test_embeddings_are_matrices_unless_told_otherwise() -> None:
    deltas = normal(2, 50, 8)
    key = "embeddings.word_embeddings.weight"
    assert torch.equal(merge(TsvM(), deltas, key=key), merge(TsvM(), deltas))
    assert torch.equal(merge(TsvM(embeddings=False), deltas, key=key), deltas.mean(0))
    assert torch.equal(merge(TsvM(embeddings=False), deltas), merge(TsvM(), deltas))


def test_inputs_stay_and_bytes_repeat() -> None:
    deltas = normal(3, 12, 30)
    before = deltas.clone()
    first, second = merge(TsvM(), deltas), merge(TsvM(), deltas)
    assert torch.equal(deltas, before)
    assert torch.equal(first, second)
    assert first.dtype == torch.float32
    assert first.is_contiguous()


def test_refusals() -> None:
    with pytest.raises(RecipeError, match="'scale' must be a finite number, got nan"):
        TsvM(scale=float("nan"))
    with pytest.raises(NumericalError, match=r"'layer\.0\.weight' must be finite"):
        merge(TsvM(), torch.full((2, 3, 3), float("inf")))
