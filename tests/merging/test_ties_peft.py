"""PEFT's TIES against PEFT."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from orthomerge.merging.ties_peft import TiesPeft
from orthomerge.merging.vectors import TaskVectors

Merge = Callable[..., dict[str, torch.Tensor]]
Make = Callable[..., TaskVectors]


def test_by_hand(vectors_of: Make, merged: Merge) -> None:
    vectors = vectors_of([4, 1, -2], [-3, 2, -1])
    # The sums 1, 3, -3 elect +, +, -; then the weights; then half where both agree.
    result = merged(TiesPeft(1.0, (0.1, 0.9)), vectors)["w"]
    torch.testing.assert_close(result, torch.tensor([0.4, 0.95, -0.55]))


@pytest.mark.parametrize("density", [0.01, 0.2, 0.5, 0.99])
@pytest.mark.parametrize("weights", [None, (0.5, 0.2, 0.3), (1.0, -0.5, 2.0)])
def test_against_peft(
    density: float,
    weights: tuple[float, ...] | None,
    random_vectors: Make,
    merged: Merge,
    stacked: Merge,
    peft_merging: ModuleType,
) -> None:
    vectors = random_vectors()
    result = merged(TiesPeft(density, weights), vectors)
    for key, deltas in stacked(vectors).items():
        expected = peft_merging.ties(list(deltas), torch.tensor(weights or (1.0,) * 3), density)
        torch.testing.assert_close(result[key], expected, rtol=1e-6, atol=1e-9)
