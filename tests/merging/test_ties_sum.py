"""TIES with a disjoint sum."""

from collections.abc import Callable

import torch

from orthomerge.merging.ties import Ties
from orthomerge.merging.ties_sum import TiesSum
from orthomerge.merging.vectors import TaskVectors

Merge = Callable[..., dict[str, torch.Tensor]]
Make = Callable[..., TaskVectors]


def test_by_hand(vectors_of: Make, merged: Merge) -> None:
    # As for Ties: [4, -3, 0, 0, 0]  [-5, 0, 3, 0, 0]  [0, -9, 7, 0, 0], but added.
    vectors = vectors_of([4, -3, 1, 0, 2], [-5, 1, 3, 0, -0.5], [-1, -9, 7, 0, 0])
    assert merged(TiesSum(0.4, scale=0.5), vectors)["w"].tolist() == [-2.5, -6, 5, 0, 0]


def test_a_sum_is_a_mean_times_those_that_agree(random_vectors: Make, merged: Merge) -> None:
    vectors = random_vectors()
    means, sums = merged(Ties(0.5), vectors), merged(TiesSum(0.5, scale=1.0), vectors)
    ratio = torch.cat([(sums[key] / means[key]).flatten() for key in sums])
    ratio = ratio[~ratio.isnan()]
    torch.testing.assert_close(ratio, ratio.round())
    assert set(ratio.round().tolist()) == {1.0, 2.0, 3.0}
