"""TSV-Merge against a naive oracle, by its theorems, and at its edges."""

import pytest
import torch
from tests.merging.matrices import merge, normal

from orthomerge.merging.tsv_m import TsvM


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
