"""Adam: torch's own steps, continuing from a state, and the rates of a schedule."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from orthomerge.core.adam import Adam, rate_share


def noisy(step: int, size: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("scale", [1.0, 1e-8])
@pytest.mark.parametrize("epsilon", [1e-8, 1e-15])
def test_it_is_torch_adam(scale: float, epsilon: float) -> None:
    own = noisy(99, 1000)
    other = own.clone().requires_grad_(True)
    adam, torchs = Adam(own, epsilon=epsilon), torch.optim.Adam([other], lr=0.01, eps=epsilon)
    for step in range(20):
        other.grad = noisy(step, 1000, scale)
        adam.step(own, other.grad, 0.01)
        torchs.step()
    torch.testing.assert_close(own, other.detach(), rtol=1e-5, atol=1e-6)
    assert adam.steps == 20


def test_a_quadratic_is_solved() -> None:
    """Minima from 1e-3 to 1 away, and curvatures over three orders of magnitude."""
    size = 700
    target = torch.logspace(-3, 0, size) * noisy(1, size).sign()
    curvature = torch.logspace(-3, 0, size)[torch.randperm(size, generator=torch.Generator().manual_seed(2))]
    values = torch.zeros(size)
    adam = Adam(values, epsilon=1e-15)
    for step in range(400):
        adam.step(values, curvature * (values - target), 0.02 * (1 - step / 400))
    assert float((values - target).abs().max()) < 0.02
    assert float((values - target).norm() / target.norm()) < 0.01


def test_a_state_continues_to_the_bit() -> None:
    values = noisy(7, 600)
    adam = Adam(values)
    for step in range(5):
        adam.step(values, noisy(step, 600), 0.1)
    state = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in adam.state().items()}
    again, other = values.clone(), Adam(values)
    other.load(state)
    for step in range(5, 10):
        adam.step(values, noisy(step, 600), 0.1)
        other.step(again, noisy(step, 600), 0.1)
    assert torch.equal(values, again)
    assert other.steps == 10


def test_no_gradient_no_step() -> None:
    values = torch.ones(300)
    Adam(values).step(values, torch.zeros(300), 1.0)
    assert torch.equal(values, torch.ones(300))


def test_rates_rise_and_fall() -> None:
    shares = [rate_share(step, 100, warmup=0.1) for step in range(100)]
    assert shares[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert shares[10] == 1.0
    assert all(late < early for early, late in pairwise(shares[10:]))
    assert shares[55] == pytest.approx(0.5)
    assert 0 < shares[-1] < 1e-3
    assert [rate_share(step, 2) for step in range(2)] == [1.0, 0.5]
