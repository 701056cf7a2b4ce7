"""Every weight by itself: AdamW's steps, drawn back to where it came from and not to zero."""

from __future__ import annotations

import torch

from orthomerge.fitting.fixed import Fixed
from orthomerge.fitting.free import Free

P = 300


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(P, generator=torch.Generator().manual_seed(seed))


def test_the_difference_moves_as_in_adamw() -> None:
    origin, weights = numbers(0), torch.empty(P)
    gates = Free(origin, lr=0.01, decay=0.5)
    gates.write(weights)
    assert torch.equal(weights, origin)
    moved = torch.zeros(P, requires_grad=True)
    torchs = torch.optim.AdamW([moved], lr=0.01, weight_decay=0.5, eps=1e-15)
    for step in range(10):
        gates.step(numbers(step), weights, 1.0)
        moved.grad = numbers(step)
        torchs.step()
    torch.testing.assert_close(weights, origin + moved.detach(), rtol=1e-5, atol=1e-6)
    assert gates.measures()["moved"] > 0
    assert gates.size == P


def test_without_a_gradient_it_goes_back() -> None:
    origin, weights = numbers(0), torch.empty(P)
    gates = Free(origin, lr=0.1, decay=1.0)
    gates.restore(numbers(1))
    gates.step(torch.zeros(P), weights, 0.5)
    torch.testing.assert_close(weights, 0.95 * numbers(1) + 0.05 * origin)
    assert torch.equal(origin, numbers(0))


def test_restored_and_loaded() -> None:
    gates, weights = Free(numbers(0), lr=0.1), torch.empty(P)
    gates.step(numbers(1), weights, 1.0)
    kept, before = gates.kept(), weights.clone()
    state = gates.state()
    state = {
        "values": state["values"].clone(),
        "adam": {k: torch.as_tensor(v).clone() for k, v in state["adam"].items()},
    }
    gates.step(numbers(2), weights, 1.0)
    other, again = Free(numbers(0), lr=0.1), torch.empty(P)
    other.load(state)
    other.step(numbers(2), again, 1.0)
    assert torch.equal(again, weights)
    gates.restore(kept)
    gates.write(weights)
    assert torch.equal(weights, before)


def test_fixed_weights_stay() -> None:
    gates, weights = Fixed(numbers(0)), torch.empty(P)
    gates.write(weights)
    gates.step(numbers(1), weights, 1.0)
    gates.load(gates.state())
    gates.restore(gates.kept())
    assert torch.equal(weights, numbers(0))
    assert gates.size == 0
    assert gates.measures() == {}
