"""Surgery by hand, both losses written out for autograd and torch's own KL, and what the module costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.alignment.planted import by_autograd
from torch.distributions import Normal, kl_divergence

from orthomerge.alignment.surgery import ProbSurgery, Surgery, first_layer
from orthomerge.core.errors import CheckpointError
from orthomerge.models.heads import SurgeryHead, rebuild_surgery
from orthomerge.testing.toys import HEADS, head_of, linear_head, pair_of, random

F, T = random(20, 6), random(20, 6, seed=1)
both = pytest.mark.parametrize("aligner", [Surgery, ProbSurgery])


def module(found: object) -> SurgeryHead:
    assert isinstance(found, SurgeryHead)
    return found


def corrected(f: torch.Tensor, D: torch.Tensor, U: torch.Tensor) -> torch.Tensor:
    return f - (f @ D.T).relu() @ U.T


def test_by_hand() -> None:
    # D f = 1 + 2 = 3 for the first input and -3, cut to 0, for the second.
    made = SurgeryHead(linear_head(torch.eye(2)), torch.tensor([[1.0, 1.0]]), torch.tensor([[0.5], [-1.0]]))
    assert made(torch.tensor([[1.0, 2.0], [-1.0, -2.0]])).tolist() == [[-0.5, 5], [-1, -2]]
    # It comes before the head normalises: (3, 4) - (0, 4) = (3, 0), which has the direction (1, 0).
    head = linear_head(10 * torch.eye(2), normalise=True)
    made = SurgeryHead(head, torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0], [1.0]]))
    assert made(torch.tensor([[3.0, 4.0]])).tolist() == [[10, 0]]


@both
@pytest.mark.parametrize("kind", HEADS)
def test_it_starts_at_the_unaligned_model(kind: str, aligner: Callable[..., Any]) -> None:
    head = head_of(kind)
    assert torch.equal(aligner(steps=1, lr=1e-30).fit(pair_of(F, T), head).classifier(F), head(F))


def check(found: Any, D: torch.Tensor, U: torch.Tensor) -> None:
    """That the module is the one that autograd found, and that the facts say how far the features are from T."""
    made = module(found.classifier)
    torch.testing.assert_close([made.down, made.up], [D, U], atol=2e-5, rtol=0)
    assert found.facts["loss_before"] == pytest.approx(float((F - T).abs().mean()))
    assert found.facts["loss"] == pytest.approx(float((corrected(F, D, U) - T).abs().mean()), rel=1e-4)


def test_its_loss() -> None:
    D = first_layer(4, 6, torch.Generator().manual_seed(3)).requires_grad_()
    U, reference = torch.zeros(6, 4, requires_grad=True), torch.nn.L1Loss()
    expected = by_autograd([D, U], lambda: reference(corrected(F, D, U), T), steps=40, lr=0.01)
    found = Surgery(rank=4, steps=40, lr=0.01, batch=20, seed=3).fit(pair_of(F, T), head_of("normalising"))
    check(found, *expected)


@pytest.mark.parametrize("beta", [0.0, 1e-4, 0.1])
def test_its_loss_by_probsurgery(beta: float) -> None:
    """The generator draws the first layer and the seed of the noise; a batch of all inputs has no order."""
    generator = torch.Generator().manual_seed(3)
    D = first_layer(5, 6, generator).requires_grad_()
    U, V = torch.zeros(6, 5, requires_grad=True), torch.zeros(6, 5, requires_grad=True)
    drawing = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator)))
    noise = iter(torch.randn(50, 20, 6, generator=drawing))

    def loss() -> torch.Tensor:
        h = (F @ D.T).relu()
        bias = Normal(h @ U.T, (h @ V.T / 2).exp())
        z = bias.loc + bias.scale * next(noise)
        distance: torch.Tensor = (F - z - T).abs().mean()
        return distance + beta * kl_divergence(bias, Normal(0.0, 1.0)).sum(1).mean()

    D_found, U_found, _ = by_autograd([D, U, V], loss, steps=30, lr=0.01)
    found = ProbSurgery(width=5, beta=beta, steps=30, lr=0.01, batch=20, seed=3).fit(pair_of(F, T), head_of("plain"))
    check(found, D_found, U_found)


@pytest.mark.parametrize(
    ("aligner", "size", "share"), [(Surgery(lr=0.01), 1, 0.1), (ProbSurgery(lr=0.01, steps=1000, width=32), 3, 0.15)]
)
def test_a_planted_module_is_taken_off(aligner: Surgery | ProbSurgery, size: float, share: float) -> None:
    f, D, U = random(400, 6) + 1, random(2, 6, seed=1), size * random(6, 2, seed=2)
    found = aligner.fit(pair_of(f, corrected(f, D, U)), head_of("plain"))
    assert float(found.facts["loss"]) < share * float(found.facts["loss_before"])


@both
def test_what_it_costs_and_rebuilding(aligner: Callable[..., Any]) -> None:
    head, (kind, r) = head_of("hidden"), ("surgery", 16) if aligner is Surgery else ("probsurgery", 128)
    made = module(aligner(steps=5).fit(pair_of(F, T), head).classifier)
    assert (made.kind, made.head, made.labels) == (kind, head, head.labels)
    assert {name: tensor.shape for name, tensor in made.extra_tensors().items()} == {"down": (r, 6), "up": (6, r)}
    assert sum(tensor.nbytes for tensor in made.extra_tensors().values()) == 2 * r * 6 * 4
    again = rebuild_surgery(head, made.extra_tensors(), kind=kind)
    assert again.kind == kind
    assert torch.equal(again(F), made(F))
    assert torch.equal(made(F), made(F)), "nothing is drawn any more"


def test_the_first_layer_starts_as_torchs_linear() -> None:
    weight = first_layer(200, 64, torch.Generator().manual_seed(0))
    assert weight.abs().max() <= 1 / 8
    assert float(weight.std()) == pytest.approx(1 / 8 / math.sqrt(3), rel=0.02)
    assert float(torch.nn.Linear(64, 200).weight.detach().abs().max()) == pytest.approx(1 / 8, rel=1e-3)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"down": torch.ones(2, 6)}, r"a surgery module must hold 'down' and 'up', got \['down'\]; align again"),
        (
            {"down": torch.ones(2, 5), "up": torch.ones(5, 2)},
            r"head of width 6 must have 'down' \[r, 6\] and 'up' \[6, r\], got \(2, 5\) and \(5, 2\); align again",
        ),
        ({"down": torch.ones(2, 6), "up": torch.ones(6, 3)}, r"got \(2, 6\) and \(6, 3\)"),
        ({"down": torch.ones(6), "up": torch.ones(6)}, r"got \(6,\) and \(6,\)"),
    ],
)
def test_tensors_that_are_no_module(tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        rebuild_surgery(head_of("plain"), tensors)
