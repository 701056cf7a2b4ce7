"""DARE: nothing dropped is task arithmetic, and on average nothing changes."""

from collections.abc import Callable

import pytest
import torch

from orthomerge.errors import RecipeError
from orthomerge.merging.dare import Dare
from orthomerge.merging.dare_ties import DareTies
from orthomerge.merging.task_arithmetic import TaskArithmetic
from orthomerge.merging.vectors import TaskVectors

Merge = Callable[..., dict[str, torch.Tensor]]
Make = Callable[..., TaskVectors]


def test_entries_are_dropped_or_enlarged(vectors_of: Make, merged: Merge) -> None:
    result = merged(Dare(0.75, scale=0.5), vectors_of([1.0] * 4000))["w"]
    assert set(result.tolist()) == {0.0, 2.0}
    assert abs(float((result > 0).float().mean()) - 0.25) < 0.03


def test_without_dropping_it_is_task_arithmetic(random_vectors: Make, merged: Merge) -> None:
    vectors = random_vectors()
    expected = merged(TaskArithmetic((0.1, 0.2, 0.3)), vectors)
    for key, delta in merged(Dare(0.0, (0.1, 0.2, 0.3)), vectors).items():
        assert torch.equal(delta, expected[key])


def test_unbiased_over_seeds(vectors_of: Make, merged: Merge) -> None:
    vectors = vectors_of([1.0, -2.0, 0.5], [3.0, 0.1, -0.5])
    mean = sum(merged(Dare(0.5, 1.0, seed), vectors)["w"] for seed in range(500)) / 500
    expected = torch.tensor([4.0, -1.9, 0.0])
    # The standard error of entry j is |(tau_1j, tau_2j)| / sqrt(500).
    errors = torch.tensor([10.0, 4.01, 0.5]).sqrt() / 500**0.5
    assert bool(((mean - expected).abs() < 4 * errors).all())


def test_the_draws_belong_to_the_expert_not_to_its_place(vectors_of: Make, merged: Merge) -> None:
    vectors = vectors_of(*torch.randn(2, 50, generator=torch.Generator().manual_seed(0)))
    swapped = TaskVectors(dict(reversed(list(vectors.vectors.items()))))
    torch.testing.assert_close(merged(Dare(), vectors)["w"], merged(Dare(), swapped)["w"])


@pytest.mark.parametrize("method", [Dare, DareTies])
@pytest.mark.parametrize("drop", [1.0, -0.1])
def test_drop_is_a_share_below_one(method: Callable[..., object], drop: float) -> None:
    with pytest.raises(RecipeError, match=r"'drop' must be in \[0, 1\), got"):
        method(drop=drop)
