"""Adam: torch's own steps, and the rates of a schedule."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from orthomerge.core.adam import Adam, Optimiser, rate_share


def noisy(step: int, size: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("scale", [1.0, 1e-8])
def test_it_is_torch_adam(scale: float) -> None:
    own = noisy(99, 1000)
    other = own.clone().requires_grad_(True)
    adam, torchs = Adam(own), torch.optim.Adam([other], lr=0.01)
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
    adam = Adam(values)
    for step in range(400):
        adam.step(values, curvature * (values - target), 0.02 * (1 - step / 400))
    assert float((values - target).abs().max()) < 0.02
    assert float((values - target).norm() / target.norm()) < 0.01


def test_groups_keep_their_full_rates() -> None:
    values = [torch.zeros(2), torch.zeros(2), torch.zeros(2)]
    groups = [{"params": [each], "lr": lr} for each, lr in zip(values, (0.1, 0.4, 0.2), strict=True)]
    optimiser = Optimiser(groups, torch.device("cpu"))
    for share in (0.5, 0.25):
        values[0].grad, values[1].grad = torch.ones(2), torch.ones(2)
        optimiser.step(share)
        assert values[0].grad is None
    assert values[0].tolist() == pytest.approx([-0.075, -0.075])
    assert values[1].tolist() == pytest.approx([-0.3, -0.3])
    assert values[2].tolist() == [0.0, 0.0]  # no gradient


def test_rates_rise_and_fall() -> None:
    shares = [rate_share(step, 100, warmup=0.1) for step in range(100)]
    assert shares[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert shares[10] == 1.0
    assert all(late < early for early, late in pairwise(shares[10:]))
    assert shares[55] == pytest.approx(0.5)
    assert 0 < shares[-1] < 1e-3
    assert [rate_share(step, 2) for step in range(2)] == [1.0, 0.5]
