"""Element methods: MagMax, consensus, breadcrumbs and the steps of TIES."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from orthomerge.core.errors import RecipeError
from orthomerge.merging.elect import disjoint_max, disjoint_mean, disjoint_sum, elect_sign, total, trim
from orthomerge.merging.elements import Breadcrumbs, Consensus, MagMax
from orthomerge.merging.ties import ties_per_tensor
from orthomerge.merging.vectors import TaskVectors

Merge = Callable[..., dict[str, torch.Tensor]]
Make = Callable[..., TaskVectors]


def test_by_hand(vectors_of: Make, merged: Merge) -> None:
    vectors = vectors_of([1, -5, 2, 0, 3], [-2, 4, -2, 0, -3], [0, 1, 1, 0, 3])
    assert merged(MagMax(0.5), vectors)["w"].tolist() == [-1, -2.5, -1, 0, 1.5]


def test_idempotent(random_vectors: Make, merged: Merge, vectors_of: Make) -> None:
    once = merged(MagMax(1.0), random_vectors())["m"]
    assert torch.equal(merged(MagMax(1.0), vectors_of(once, once))["w"], once)


def test_the_order_matters_only_among_equals(random_vectors: Make, merged: Merge) -> None:
    vectors = random_vectors()
    swapped = TaskVectors(dict(reversed(list(vectors.vectors.items()))))
    assert torch.equal(merged(MagMax(), vectors)["m"], merged(MagMax(), swapped)["m"])


def test_against_argmax(random_vectors: Make, merged: Merge, stacked: Merge) -> None:
    vectors = random_vectors(coarse=True, experts=5)
    result = merged(MagMax(1.0), vectors)
    for key, deltas in stacked(vectors).items():
        latest = deltas.flip(0)  # argmax takes the first among equals
        if deltas[0].numel():
            assert torch.equal(result[key], latest.gather(0, latest.abs().argmax(0, keepdim=True))[0])


def test_consensus_by_hand(vectors_of: Make, merged: Merge) -> None:
    # tau_m = [3, 10, 0, 2, 0]. Who uses an entry, with lambda = 0.5, |tau| > 0.5 |rest|?
    #   1, 2:  1 > 1 no, 2 > 0.5 yes                 one user
    #   9, 1:  9 > 0.5, 1 > 4.5 no                   one user
    #   4, -4: 4 > 2, 4 > 2                          two users, but nothing in sum
    #   1, 1:  1 > 0.5, 1 > 0.5                      two users
    #   0, 0                                         none
    vectors = vectors_of([1, 9, 4, 1, 0], [2, 1, -4, 1, 0])
    assert merged(Consensus(0.5, agree=2, scale=1.0), vectors)["w"].tolist() == [0, 0, 0, 2, 0]
    assert merged(Consensus(0.5, agree=1, scale=2.0), vectors)["w"].tolist() == [6, 20, 0, 4, 0]
    assert merged(Consensus((0.1, 0.5), agree=2, scale=1.0), vectors)["w"].tolist() == [3, 0, 0, 2, 0]


def test_a_threshold_of_zero_keeps_every_entry_that_is_used(random_vectors: Make, merged: Merge) -> None:
    vectors = random_vectors()
    expected = sum((vector["m"] for vector in vectors.vectors.values()), torch.zeros(()))
    assert torch.equal(merged(Consensus(0.0, agree=3, scale=1.0), vectors)["m"], expected)


def test_against_the_formula(random_vectors: Make, merged: Merge, stacked: Merge) -> None:
    vectors = random_vectors(experts=4, coarse=True)
    result = merged(Consensus(0.4, agree=2), vectors)
    for key, deltas in stacked(vectors).items():
        uses = deltas.abs() > 0.4 * (deltas.sum(0) - deltas).abs()
        torch.testing.assert_close(result[key], 0.3 * deltas.sum(0) * (uses.sum(0) >= 2))


def test_more_agreement_than_experts_is_refused(vectors_of: Make, merged: Merge) -> None:
    with pytest.raises(RecipeError, match=r"'agree' is 3, but there are 2 experts: .* set it to at most 2"):
        merged(Consensus(agree=3), vectors_of([1.0], [2.0]))


def test_agreement_of_nobody_is_refused() -> None:
    with pytest.raises(RecipeError, match="'agree' must be at least 1, got 0"):
        Consensus(agree=0)


TEN = [1, -2, 3, -4, 5, -6, 7, -8, 9, -10]


@pytest.mark.parametrize(
    ("density", "gamma", "expected"),
    [
        (0.5, 0.2, [0, 0, 0, -4, 5, -6, 7, -8, 0, 0]),
        (0.5, 0.0, [0, 0, 0, 0, 0, -6, 7, -8, 9, -10]),
        (0.9, 0.3, [1, -2, 3, -4, 5, -6, 7, -8, 9, 0]),  # they do not both fit: fewer outliers go
        (1.0, 0.3, TEN),
        (0.05, 0.1, [0] * 10),
    ],
)
def test_breadcrumbs_by_hand(
    density: float, gamma: float, expected: list[float], vectors_of: Make, merged: Merge
) -> None:
    assert merged(Breadcrumbs(density, gamma, 1.0), vectors_of(TEN))["w"].tolist() == expected


def test_equal_entries_stay_together(vectors_of: Make, merged: Merge) -> None:
    vectors = vectors_of([3, 3, -3, 1, 1, 1, 1, 1, 0, 9])
    assert merged(Breadcrumbs(0.4, 0.2, 1.0), vectors)["w"].tolist() == [3, 3, -3, 1, 1, 1, 1, 1, 0, 0]


def test_without_outliers_it_is_a_trim(vectors_of: Make, merged: Merge) -> None:
    vectors = vectors_of(torch.randn(300, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(merged(Breadcrumbs(0.3, 0.0, 1.0), vectors)["w"], merged(ties_per_tensor(0.3), vectors)["w"])


def _naive(delta: torch.Tensor, density: float, gamma: float) -> torch.Tensor:
    if density >= 1:
        return delta
    n = delta.numel()
    target, top = int(density * n), int(gamma * n)
    bottom = max(0, n - target - top)
    mask = torch.zeros(n)
    mask[delta.abs().flatten().argsort()[bottom : bottom + target]] = 1
    return delta * mask.reshape(delta.shape)


@pytest.mark.parametrize("density", [0.01, 0.5, 0.9, 0.995, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.01, 0.2])
def test_against_sorting(
    density: float,
    gamma: float,
    random_vectors: Make,
    merged: Merge,
    stacked: Merge,
) -> None:
    vectors = random_vectors()
    result = merged(Breadcrumbs(density, gamma, (0.1, 0.2, 0.3)), vectors)
    for key, deltas in stacked(vectors).items():
        kept = [_naive(delta, density, gamma) * w for delta, w in zip(deltas, (0.1, 0.2, 0.3), strict=True)]
        torch.testing.assert_close(result[key], torch.stack(kept).sum(0), rtol=1e-6, atol=1e-9)


ROWS = [torch.tensor([1.0, -2.0, 3.0, 2.0, 0.0]), torch.tensor([2.0, 1.0, -5.0, -2.0, 0.0])]
SIGN = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0])


def test_trim_keeps_what_is_as_large_as_the_threshold() -> None:
    row = torch.tensor([0.5, -0.5, 0.49999997, 0.0, -3.0])
    assert trim([row], [0.5])[0].tolist() == [0.5, -0.5, 0.0, 0.0, -3.0]


def test_trim_at_the_ends() -> None:
    row = torch.tensor([1e-45, -1.0, 3.4028235e38, 0.0])
    nothing, everything, smallest = trim([row] * 3, [float("inf"), 0.0, float(row[0])])
    assert not nothing.any()
    assert everything is row
    assert torch.equal(smallest, row)


def test_a_sum_of_zero_elects_plus() -> None:
    assert torch.equal(elect_sign(ROWS), SIGN)


def test_disjoint_merges() -> None:
    assert total(ROWS).tolist() == [3.0, -1.0, -2.0, 0.0, 0.0]
    assert disjoint_sum(ROWS, SIGN).tolist() == [3.0, -2.0, -5.0, 2.0, 0.0]
    assert disjoint_mean(ROWS, SIGN).tolist() == [1.5, -2.0, -5.0, 2.0, 0.0]
    assert disjoint_max(ROWS, SIGN).tolist() == [2.0, -2.0, -5.0, 2.0, 0.0]


def test_disjoint_mean_with_factors_and_votes() -> None:
    assert disjoint_mean(ROWS, SIGN, factors=(10.0, 1.0)).tolist() == [6.0, -20.0, -5.0, 20.0, 0.0]
    assert disjoint_mean(ROWS, SIGN, votes=(0.5, 0.25)).tolist() == [4.0, -4.0, -20.0, 4.0, 0.0]
    assert disjoint_mean(ROWS, SIGN, votes=(1.0, -1.0)).tolist() == [3.0, -2.0, 5.0, 2.0, 0.0]  # 1 - 1: left
