"""Probsurgery against its loss written out for autograd and torch's own KL; afterwards it is Surgery's module."""

from __future__ import annotations

import pytest
import torch
from tests.alignment.toys import HEADS, by_autograd, head_of, pair_of, random
from torch.distributions import Normal, kl_divergence

from orthomerge.alignment.probsurgery import ProbSurgery
from orthomerge.alignment.surgery import first_layer
from orthomerge.core.errors import CheckpointError
from orthomerge.models.extras import SurgeryHead, rebuild_surgery
from orthomerge.models.heads import Extra


def module(found: object) -> SurgeryHead:
    assert isinstance(found, SurgeryHead)
    return found


@pytest.mark.parametrize("beta", [0.0, 1e-4, 0.1])
def test_its_loss(beta: float) -> None:
    """The generator draws the first layer and the seed of the noise; a batch of all inputs has no order."""
    f, t, steps = random(20, 6), random(20, 6, seed=1), 30
    generator = torch.Generator().manual_seed(3)
    D = first_layer(5, 6, generator).requires_grad_()
    U, V = torch.zeros(6, 5, requires_grad=True), torch.zeros(6, 5, requires_grad=True)
    drawing = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator)))
    noise = iter(torch.randn(50, 20, 6, generator=drawing))

    def loss() -> torch.Tensor:
        h = (f @ D.T).relu()
        bias = Normal(h @ U.T, (h @ V.T / 2).exp())
        z = bias.loc + bias.scale * next(noise)
        distance: torch.Tensor = (f - z - t).abs().mean()
        return distance + beta * kl_divergence(bias, Normal(0.0, 1.0)).sum(1).mean()

    D_found, U_found, _ = by_autograd([D, U, V], loss, steps=steps, lr=0.01)
    found = ProbSurgery(width=5, beta=beta, steps=steps, lr=0.01, batch=20, seed=3).fit(pair_of(f, t), head_of("plain"))
    made = module(found.classifier)
    torch.testing.assert_close([made.down, made.up], [D_found, U_found], atol=2e-5, rtol=0)
    corrected = f - (f @ D_found.T).relu() @ U_found.T
    assert found.facts["loss_before"] == pytest.approx(float((f - t).abs().mean()))
    assert found.facts["loss"] == pytest.approx(float((corrected - t).abs().mean()), rel=1e-4)


@pytest.mark.parametrize("kind", HEADS)
def test_it_starts_at_the_unaligned_model(kind: str) -> None:
    head, f = head_of(kind), random(9, 6)
    found = ProbSurgery(steps=1, lr=1e-30).fit(pair_of(f, random(9, 6, seed=1)), head)
    assert torch.equal(found.classifier(f), head(f))


def test_a_planted_module_is_taken_off() -> None:
    f = random(400, 6) + 1
    D, U = random(2, 6, seed=1), 3 * random(6, 2, seed=2)
    found = ProbSurgery(lr=0.01, steps=1000, width=32).fit(pair_of(f, f - (f @ D.T).relu() @ U.T), head_of("plain"))
    assert float(found.facts["loss"]) < 0.15 * float(found.facts["loss_before"])


def test_what_it_costs_and_rebuilding() -> None:
    head, f = head_of("plain"), random(9, 6)
    made: Extra = module(ProbSurgery(steps=3).fit(pair_of(f, random(9, 6, seed=1)), head).classifier)
    assert made.kind == "probsurgery"
    assert {name: tensor.shape for name, tensor in made.extra_tensors().items()} == {"down": (128, 6), "up": (6, 128)}
    again = rebuild_surgery(head, made.extra_tensors(), kind="probsurgery")
    assert again.kind == "probsurgery"
    assert torch.equal(again(f), made(f))
    assert torch.equal(made(f), made(f)), "nothing is drawn any more"


def test_tensors_that_are_no_module() -> None:
    with pytest.raises(CheckpointError, match="a probsurgery module must hold 'down' and 'up'"):
        rebuild_surgery(head_of("plain"), {}, kind="probsurgery")
