"""Model Stock: the angle decides."""

from collections.abc import Callable
from itertools import combinations

import pytest
import torch

from orthomerge.core.errors import RecipeError
from orthomerge.merging.angles import ModelStock
from orthomerge.merging.vectors import TaskVectors

Merge = Callable[..., dict[str, torch.Tensor]]
Make = Callable[..., TaskVectors]


def test_by_hand(vectors_of: Make, merged: Merge) -> None:
    # cos = 3/5, so t = 2 * 0.6 / 1.6 = 0.75, of the mean (4, 2).
    result = merged(ModelStock(), vectors_of([5, 0], [3, 4]))["w"]
    torch.testing.assert_close(result, torch.tensor([3.0, 1.5]))


def test_parallel_experts_give_the_average(vectors_of: Make, merged: Merge) -> None:
    result = merged(ModelStock(), vectors_of([1, 2], [2, 4], [3, 6]))["w"]
    torch.testing.assert_close(result, torch.tensor([2.0, 4.0]))


@pytest.mark.parametrize("second", [[0, 1], [-1, 0.5], [0, 0]], ids=["orthogonal", "opposed", "zero"])
def test_experts_with_nothing_in_common_give_the_base(second: list[float], vectors_of: Make, merged: Merge) -> None:
    assert merged(ModelStock(), vectors_of([1, 0], second))["w"].tolist() == [0, 0]


def test_against_the_formula(vectors_of: Make, merged: Merge) -> None:
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(20, 30, generator=generator)
    experts = [shared + torch.randn(20, 30, generator=generator) for _ in range(4)]
    pairs = [torch.cosine_similarity(a.flatten(), b.flatten(), dim=0) for a, b in combinations(experts, 2)]
    cos = float(torch.stack(pairs).mean())
    expected = 4 * cos / (1 + 3 * cos) * torch.stack(experts).mean(0)
    torch.testing.assert_close(merged(ModelStock(), vectors_of(*experts))["w"], expected)


def test_one_expert_is_refused(vectors_of: Make) -> None:
    with pytest.raises(RecipeError, match="model stock needs at least 2 experts, whose angle decides, got 1"):
        ModelStock().survey(vectors_of([1.0]))
