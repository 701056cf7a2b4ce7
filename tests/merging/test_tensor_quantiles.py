"""Thresholds of each tensor, read whole or streamed."""

from collections.abc import Callable

import pytest
import torch

from orthomerge.merging.tensor_quantiles import tensor_quantiles
from orthomerge.merging.vectors import TaskVectors

Make = Callable[..., TaskVectors]


@pytest.mark.parametrize("most", [0, 1 << 30], ids=["streamed", "whole"])
@pytest.mark.parametrize("tile", [7, 1 << 18])
@pytest.mark.parametrize("coarse", [False, True])
def test_both_ways_agree_with_sorting(
    most: int,
    tile: int,
    coarse: bool,
    random_vectors: Make,
    stacked: Callable[[TaskVectors], dict[str, torch.Tensor]],
) -> None:
    vectors = random_vectors(tile=tile, coarse=coarse)
    found = tensor_quantiles(vectors, lambda count: (count // 3, 1, 0, count + 1), most=most)
    assert list(found) == list(vectors.shapes)
    for key, deltas in stacked(vectors).items():
        sorted_ = deltas.reshape(3, deltas[0].numel()).abs().sort(dim=1, descending=True).values
        third, largest, nothing, everything = found[key]
        count = sorted_.shape[1]
        if count:
            assert largest == tuple(sorted_[:, 0].tolist())
        if count >= 3:
            assert third == tuple(sorted_[:, count // 3 - 1].tolist())
        assert nothing == (float("inf"),) * 3
        assert everything == (0.0,) * 3
