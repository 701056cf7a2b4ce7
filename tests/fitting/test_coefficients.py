"""Coefficients a task and group: weights by the formula, gradients against autograd, bounds that stop them."""

from __future__ import annotations

import pytest
import torch

from orthomerge.fitting.coefficients import Coefficients, Groups
from orthomerge.fitting.layout import Layout

LAYOUT = Layout({"matrix": (3, 5), "vector": (4,), "scalar": (), "kernel": (2, 3, 2, 2)})
T = 3
COUNTS: dict[Groups, int] = {"encoder": 1, "tensor": 4, "row": 3 + 4 + 1 + 2}


def flat(seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return LAYOUT.flat({name: torch.randn(shape, generator=random) for name, shape in LAYOUT.shapes.items()})


def make(groups: Groups, *, bounds: tuple[float, float] | None = None, lr: float = 0.1) -> Coefficients:
    vectors = torch.stack([flat(seed) for seed in range(1, T + 1)])
    return Coefficients(flat(0), vectors, LAYOUT, groups=groups, start=0.3, lr=lr, bounds=bounds)


def expected(values: torch.Tensor, groups: Groups, bounds: tuple[float, float] | None = None) -> torch.Tensor:
    """The formula, element by element through an index of groups."""
    index, count = torch.zeros(LAYOUT.size, dtype=torch.int64), 0
    for name, place in LAYOUT.places.items():
        shape, size = LAYOUT.shapes[name], place.stop - place.start
        rows = shape[0] if groups == "row" and shape else 1
        index[place] = 0 if groups == "encoder" else count + torch.arange(rows).repeat_interleave(size // rows)
        count += rows
    clamped = values if bounds is None else values.clamp(*bounds)
    total = flat(0)
    for number in range(T):
        total = total + clamped[number][index] * flat(number + 1)
    return total


@pytest.mark.parametrize("groups", COUNTS)
@pytest.mark.parametrize("bounds", [None, (0.0, 1.0)])
def test_weights_and_gradient(groups: Groups, bounds: tuple[float, float] | None) -> None:
    gates, weights = make(groups, bounds=bounds), torch.empty(LAYOUT.size)
    assert gates.values.shape == (T, COUNTS[groups])
    assert gates.size == T * COUNTS[groups]
    gates.restore(0.5 + torch.randn(gates.values.shape, generator=torch.Generator().manual_seed(9)))
    values = gates.values.clone().requires_grad_(True)
    theta = expected(values, groups, bounds)
    gates.write(weights)
    torch.testing.assert_close(weights, theta.detach())
    direction = flat(7)
    (theta @ direction).backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    torch.testing.assert_close(gates.gradient(direction), values.grad)
    gates.step(direction, weights, 0.5)
    torch.testing.assert_close(gates.values, values.detach() - 0.05 * values.grad.sign())
    torch.testing.assert_close(weights, expected(gates.values, groups, bounds))


def test_bounds_stop_the_gradient_and_count_as_the_bound() -> None:
    gates = make("tensor", bounds=(0.0, 1.0))
    gates.restore(torch.tensor([[-0.5, 0.0, 0.5, 1.0], [1.5, 0.2, 0.2, 0.2], [0.2, 0.2, 0.2, -1.0]]))
    stopped = gates.gradient(flat(7)) == 0
    assert stopped.tolist() == [[True, False, False, False], [True, False, False, False], [False, False, False, True]]
    assert gates.measures()["least"] == 0.0
    assert gates.measures()["most"] == 1.0
    assert gates.clamped()[0].tolist() == [0.0, 0.0, 0.5, 1.0]
    assert make("row").measures() == pytest.approx({"least": 0.3, "mean": 0.3, "most": 0.3})


def test_restored_and_loaded() -> None:
    gates, weights = make("row"), torch.empty(LAYOUT.size)
    gates.step(flat(7), weights, 1.0)
    kept, before = gates.kept(), weights.clone()
    state = gates.state()
    state = {
        "values": state["values"].clone(),
        "adam": {k: torch.as_tensor(v).clone() for k, v in state["adam"].items()},
    }
    gates.step(flat(8), weights, 1.0)
    other, again = make("row"), torch.empty(LAYOUT.size)
    other.load(state)
    other.step(flat(8), again, 1.0)
    assert torch.equal(again, weights)
    gates.restore(kept)
    gates.write(weights)
    assert torch.equal(weights, before)
