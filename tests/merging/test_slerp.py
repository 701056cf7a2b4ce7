"""Slerp: along the arc between two experts' weights."""

import math
from collections.abc import Callable

import pytest
import torch

from orthomerge.core.errors import RecipeError
from orthomerge.merging.angles import Slerp
from orthomerge.merging.vectors import TaskVectors

Merge = Callable[..., dict[str, torch.Tensor]]
Make = Callable[..., TaskVectors]

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
