"""Model Stock and spherical interpolation: by hand, by theorems, and against mergekit."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

import pytest
import torch

from orthomerge.core.errors import RecipeError
from orthomerge.merging.angles import ModelStock, Slerp
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


GENERATOR = torch.Generator().manual_seed(0)
BASE = torch.randn(6, 7, generator=GENERATOR)
FIRST, SECOND = torch.randn(2, 6, 7, generator=GENERATOR)


def _between(t: float, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """On float64 weights, straight from the definition."""
    a, b = first.double(), second.double()
    cos = float((a * b).sum() / (a.norm() * b.norm()))
    if abs(cos) > 0.9995:
        return (1 - t) * a + t * b
    w = math.acos(cos)
    return (math.sin((1 - t) * w) * a + math.sin(t * w) * b) / math.sin(w)


def test_a_quarter_of_a_right_angle(vectors_of: Make, merged: Merge) -> None:
    result = merged(Slerp(0.5), vectors_of([2, 0], [0, 2]))["w"]
    torch.testing.assert_close(result, torch.tensor([2**0.5, 2**0.5]))


@pytest.mark.parametrize("t", [0.0, 0.3, 0.5, 1.0])
def test_against_the_definition(t: float, vectors_of: Make, merged: Merge) -> None:
    vectors = vectors_of(FIRST - BASE, SECOND - BASE, base={"w": BASE})
    result = BASE + merged(Slerp(t), vectors)["w"]
    torch.testing.assert_close(result, _between(t, FIRST, SECOND).float(), rtol=1e-5, atol=1e-6)


def test_the_ends_are_the_experts(vectors_of: Make, merged: Merge) -> None:
    vectors = vectors_of(FIRST, SECOND, base={"w": BASE})
    assert torch.equal(merged(Slerp(0.0), vectors)["w"], vectors.vectors["a"]["w"])
    assert torch.equal(merged(Slerp(1.0), vectors)["w"], vectors.vectors["b"]["w"])


def test_nearly_parallel_weights_are_interpolated_linearly(vectors_of: Make, merged: Merge) -> None:
    vectors = vectors_of(FIRST * 1e-3, SECOND * 1e-3, base={"w": BASE})
    first, second = (vector["w"] for vector in vectors.vectors.values())
    torch.testing.assert_close(merged(Slerp(0.25), vectors)["w"], 0.75 * first + 0.25 * second)


def test_an_expert_of_zero_weights(vectors_of: Make, merged: Merge) -> None:
    # No angle: taken for a right one, as in mergekit.
    result = merged(Slerp(0.5), vectors_of([0, 0], [0, 2]))["w"]
    torch.testing.assert_close(result, torch.tensor([0.0, 2**0.5]))


@pytest.mark.parametrize("count", [1, 3])
def test_two_experts_exactly(count: int, vectors_of: Make) -> None:
    with pytest.raises(RecipeError, match=f"slerp merges exactly 2 experts, got {count}"):
        Slerp().survey(vectors_of(*[[1.0]] * count))


@pytest.mark.parametrize("t", [-0.1, 1.1])
def test_t_is_a_share(t: float) -> None:
    with pytest.raises(RecipeError, match=r"'t' must be in \[0, 1\], got"):
        Slerp(t)
