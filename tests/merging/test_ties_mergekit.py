"""mergekit's TIES: by hand, and against its steps spelled out naively."""

from collections.abc import Callable

import pytest
import torch

from orthomerge.merging.ties_mergekit import TiesMergekit
from orthomerge.merging.vectors import TaskVectors

Merge = Callable[..., dict[str, torch.Tensor]]
Make = Callable[..., TaskVectors]


def test_the_weights_decide_the_sign(vectors_of: Make, merged: Merge) -> None:
    vectors = vectors_of([4, 1, -2], [-3, 2, -1])
    # Weighted: [0.4, 0.1, -0.2] and [-2.7, 1.8, -0.9]: the lighter expert loses its four.
    result = merged(TiesMergekit(weights=(0.1, 0.9)), vectors)["w"]
    torch.testing.assert_close(result, torch.tensor([-3.0, 1.9, -1.1]))
    plain = merged(TiesMergekit(weights=(0.1, 0.9), normalize=False, scale=2.0), vectors)["w"]
    torch.testing.assert_close(plain, torch.tensor([-5.4, 3.8, -2.2]))


def test_one_entry_stays_however_small_the_density(vectors_of: Make, merged: Merge) -> None:
    assert merged(TiesMergekit(0.01), vectors_of([1, -3, 2]))["w"].tolist() == [0, -3, 0]


def test_weights_that_cancel_are_not_divided_by(vectors_of: Make, merged: Merge) -> None:
    assert merged(TiesMergekit(weights=(1.0, -1.0)), vectors_of([2.0], [-3.0]))["w"].tolist() == [5.0]


def _naive(deltas: torch.Tensor, method: TiesMergekit, weights: tuple[float, ...]) -> torch.Tensor:
    rows = []
    for delta, weight in zip(deltas, weights, strict=True):
        mask = torch.zeros(delta.numel())
        mask[delta.abs().flatten().argsort(descending=True)[: max(1, int(method.density * delta.numel()))]] = 1
        rows.append(delta * mask.reshape(delta.shape) * weight)
    stacked = torch.stack(rows)
    mask = stacked.sign() == torch.where(stacked.sum(0) >= 0, 1.0, -1.0)
    result = (stacked * mask).sum(0)
    if method.normalize:
        numbers = torch.tensor(weights).reshape(-1, *(1,) * (deltas.ndim - 1))
        divisor = (numbers * mask).sum(0)
        result = result / torch.where(divisor == 0, 1, divisor)
    return result * method.scale


@pytest.mark.parametrize("density", [0.001, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("weights", [None, (0.5, 0.2, 0.3), (1.0, -0.5, 2.0)])
@pytest.mark.parametrize("normalize", [True, False])
def test_against_its_steps(
    density: float,
    weights: tuple[float, ...] | None,
    normalize: bool,
    random_vectors: Make,
    merged: Merge,
    stacked: Merge,
) -> None:
    method = TiesMergekit(density, weights, normalize=normalize, scale=0.7)
    vectors = random_vectors()
    result = merged(method, vectors)
    for key, deltas in stacked(vectors).items():
        if deltas[0].numel():
            expected = _naive(deltas, method, weights or (1.0,) * 3)
            torch.testing.assert_close(result[key], expected, rtol=1e-6, atol=1e-9)
