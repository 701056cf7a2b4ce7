"""Adam over a flat tensor: torch's own steps in float32, narrow moments that arrive, and going on from a state."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from orthomerge.fitting import adam
from orthomerge.fitting.adam import FlatAdam, Moments, pieces

CPU = torch.device("cpu")
KINDS = get_args(Moments)


def noisy(step: int, size: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("scale", [1.0, 1e-8])
def test_float32_is_torch_adam(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("moments", KINDS)
def test_a_quadratic_is_solved(moments: Moments) -> None:
    """Minima from 1e-3 to 1 away, and curvatures over three orders of magnitude, in one block of 256."""
    size = 700
    target = torch.logspace(-3, 0, size) * noisy(1, size).sign()
    curvature = torch.logspace(-3, 0, size)[torch.randperm(size, generator=torch.Generator().manual_seed(2))]
    values, found = torch.zeros(size), FlatAdam(size, CPU, moments=moments)
    for step in range(400):
        gradient = curvature * (values - target)
        found.step(values, gradient.__getitem__, 0.02 * (1 - step / 400))
    assert float((values - target).abs().max()) < (0.06 if moments == "int8" else 0.02)
    assert float((values - target).norm() / target.norm()) < 0.01


@pytest.mark.parametrize("moments", KINDS)
def test_a_second_moment_changes_by_less_than_its_rounding(moments: Moments) -> None:
    """After a large gradient come small ones: 0.999 a step is below half a unit of bfloat16, and yet it falls."""
    size = 1024
    values, found = torch.zeros(size), FlatAdam(size, CPU, moments=moments)
    for step in range(300):
        now = torch.full((size,), 1.0 if step == 0 else 1e-3)
        found.step(values, now.__getitem__, 0.0)
    second = found._second.read(slice(0, size), root=True)
    assert float(second.mean()) == pytest.approx(1e-3 * 0.999**299, rel=0.1)


@pytest.mark.parametrize("moments", KINDS)
def test_a_state_goes_on_to_the_bit(moments: Moments) -> None:
    values, found = noisy(7, 600), FlatAdam(600, CPU, moments=moments, seed=3)

    def run(some: FlatAdam, numbers: torch.Tensor, first: int, last: int) -> None:
        for step in range(first, last):
            some.step(numbers, noisy(step, 600).__getitem__, 0.1)

    run(found, values, 0, 5)
    state = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in found.state().items()}
    again, other = values.clone(), FlatAdam(600, CPU, moments=moments)
    other.load(state)
    run(found, values, 5, 10)
    run(other, again, 5, 10)
    assert torch.equal(values, again)
    assert other.steps == 10


def test_no_gradient_no_step() -> None:
    for moments in KINDS:
        values, found = torch.ones(300), FlatAdam(300, CPU, moments=moments)
        found.step(values, torch.zeros(300).__getitem__, 1.0)
        assert torch.equal(values, torch.ones(300))


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 200000])
def test_pieces_cover_everything_once(size: int) -> None:
    seen = torch.zeros(size)
    for place in pieces(size, CPU):
        assert place.start % 256 == 0
        seen[place] += 1
    assert torch.equal(seen, torch.ones(size))
