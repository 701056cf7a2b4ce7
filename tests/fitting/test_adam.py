"""Adam over a flat tensor: torch's own steps, and going on from a state."""

from __future__ import annotations

import pytest
import torch

from orthomerge.fitting import adam
from orthomerge.fitting.adam import FlatAdam, pieces

CPU = torch.device("cpu")


def noisy(step: int, size: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("scale", [1.0, 1e-8])
def test_it_is_torch_adam(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(adam._PIECE, "cpu", 256)
    mine = noisy(99, 1000)
    other = mine.clone().requires_grad_(True)
    flat, torchs = FlatAdam(1000, CPU), torch.optim.Adam([other], lr=0.01, eps=1e-15)
    for step in range(20):
        gradient = noisy(step, 1000, scale)
        flat.step(mine, gradient.__getitem__, 0.01)
        other.grad = gradient
        torchs.step()
    torch.testing.assert_close(mine, other.detach(), rtol=1e-5, atol=1e-6)
    assert flat.steps == 20


def test_a_quadratic_is_solved() -> None:
    """Minima from 1e-3 to 1 away, and curvatures over three orders of magnitude."""
    size = 700
    target = torch.logspace(-3, 0, size) * noisy(1, size).sign()
    curvature = torch.logspace(-3, 0, size)[torch.randperm(size, generator=torch.Generator().manual_seed(2))]
    values, found = torch.zeros(size), FlatAdam(size, CPU)
    for step in range(400):
        gradient = curvature * (values - target)
        found.step(values, gradient.__getitem__, 0.02 * (1 - step / 400))
    assert float((values - target).abs().max()) < 0.02
    assert float((values - target).norm() / target.norm()) < 0.01


def test_a_state_goes_on_to_the_bit() -> None:
    values, found = noisy(7, 600), FlatAdam(600, CPU)

    def run(some: FlatAdam, numbers: torch.Tensor, first: int, last: int) -> None:
        for step in range(first, last):
            some.step(numbers, noisy(step, 600).__getitem__, 0.1)

    run(found, values, 0, 5)
    state = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in found.state().items()}
    again, other = values.clone(), FlatAdam(600, CPU)
    other.load(state)
    run(found, values, 5, 10)
    run(other, again, 5, 10)
    assert torch.equal(values, again)
    assert other.steps == 10


def test_no_gradient_no_step() -> None:
    values, found = torch.ones(300), FlatAdam(300, CPU)
    found.step(values, torch.zeros(300).__getitem__, 1.0)
    assert torch.equal(values, torch.ones(300))


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 200000])
def test_pieces_cover_everything_once(size: int) -> None:
    seen = torch.zeros(size)
    for place in pieces(size, CPU):
        assert place.start % 256 == 0
        seen[place] += 1
    assert torch.equal(seen, torch.ones(size))
