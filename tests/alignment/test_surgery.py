"""Surgery by hand, both losses written out for autograd and torch's own KL, and what the module costs."""

from __future__ import annotations

import math

import pytest
import torch
from tests.alignment.toys import by_autograd
from torch.distributions import Normal, kl_divergence

from orthomerge.alignment.surgery import ProbSurgery, Surgery, first_layer
from orthomerge.core.errors import CheckpointError
from orthomerge.models.heads import Extra, SurgeryHead, rebuild_surgery
from orthomerge.testing.toys import HEADS, head_of, linear_head, pair_of, random


def module(found: object) -> SurgeryHead:
    assert isinstance(found, SurgeryHead)
    return found


def test_by_hand() -> None:
    # D f = 1 + 2 = 3 for the first input and -3, cut to 0, for the second.
    made = SurgeryHead(linear_head(torch.eye(2)), torch.tensor([[1.0, 1.0]]), torch.tensor([[0.5], [-1.0]]))
    assert made(torch.tensor([[1.0, 2.0], [-1.0, -2.0]])).tolist() == [[-0.5, 5], [-1, -2]]


def test_it_comes_before_the_head_normalises() -> None:
    # (3, 4) - (0, 4) = (3, 0), which has the direction (1, 0).
    head = linear_head(10 * torch.eye(2), normalise=True)
    made = SurgeryHead(head, torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0], [1.0]]))
    assert made(torch.tensor([[3.0, 4.0]])).tolist() == [[10, 0]]


@pytest.mark.parametrize("kind", HEADS)
def test_it_starts_at_the_unaligned_model(kind: str) -> None:
    head, f = head_of(kind), random(9, 6)
    found = Surgery(steps=1, lr=1e-30).fit(pair_of(f, random(9, 6, seed=1)), head)
    assert torch.equal(found.classifier(f), head(f))


def test_its_loss() -> None:
    f, t = random(20, 6), random(20, 6, seed=1)
    generator = torch.Generator().manual_seed(3)
    D, U = first_layer(4, 6, generator).requires_grad_(), torch.zeros(6, 4, requires_grad=True)
    reference = torch.nn.L1Loss()
    expected = by_autograd([D, U], lambda: reference(f - (f @ D.T).relu() @ U.T, t), steps=40, lr=0.01)
    found = Surgery(rank=4, steps=40, lr=0.01, batch=20, seed=3).fit(pair_of(f, t), head_of("normalising"))
    made = module(found.classifier)
    torch.testing.assert_close([made.down, made.up], expected, atol=2e-5, rtol=0)
    assert found.facts["loss_before"] == pytest.approx(float((f - t).abs().mean()))
    corrected = f - (f @ made.down.T).relu() @ made.up.T
    assert found.facts["loss"] == pytest.approx(float((corrected - t).abs().mean()), rel=1e-5)


def test_a_planted_module_is_taken_off() -> None:
    f = random(400, 6) + 1
    D, U = random(2, 6, seed=1), random(6, 2, seed=2)
    found = Surgery(lr=0.01).fit(pair_of(f, f - (f @ D.T).relu() @ U.T), head_of("plain"))
    assert float(found.facts["loss"]) < 0.1 * float(found.facts["loss_before"])


def test_what_it_costs() -> None:
    head = head_of("plain")
    made: Extra = module(Surgery(steps=2).fit(pair_of(random(9, 6), random(9, 6, seed=1)), head).classifier)
    assert made.kind == "surgery"
    assert made.head is head
    assert made.labels == head.labels
    assert {name: tensor.shape for name, tensor in made.extra_tensors().items()} == {"down": (16, 6), "up": (6, 16)}
    assert sum(tensor.nbytes for tensor in made.extra_tensors().values()) == 2 * 16 * 6 * 4


def test_the_first_layer_starts_as_torchs_linear() -> None:
    weight = first_layer(200, 64, torch.Generator().manual_seed(0))
    assert weight.abs().max() <= 1 / 8
    assert float(weight.std()) == pytest.approx(1 / 8 / math.sqrt(3), rel=0.02)
    assert float(torch.nn.Linear(64, 200).weight.detach().abs().max()) == pytest.approx(1 / 8, rel=1e-3)


def test_rebuilding() -> None:
    head, f = head_of("hidden"), random(9, 6)
    made = module(Surgery(steps=5).fit(pair_of(f, random(9, 6, seed=1)), head).classifier)
    again = rebuild_surgery(head, made.extra_tensors())
    assert again.kind == "surgery"
    assert torch.equal(again(f), made(f))


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


@pytest.mark.parametrize("beta", [0.0, 1e-4, 0.1])
def test_its_loss_by_probsurgery(beta: float) -> None:
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
def test_it_starts_at_the_unaligned_model_by_probsurgery(kind: str) -> None:
    head, f = head_of(kind), random(9, 6)
    found = ProbSurgery(steps=1, lr=1e-30).fit(pair_of(f, random(9, 6, seed=1)), head)
    assert torch.equal(found.classifier(f), head(f))


def test_a_planted_module_is_taken_off_by_probsurgery() -> None:
    f = random(400, 6) + 1
    D, U = random(2, 6, seed=1), 3 * random(6, 2, seed=2)
    found = ProbSurgery(lr=0.01, steps=1000, width=32).fit(pair_of(f, f - (f @ D.T).relu() @ U.T), head_of("plain"))
    assert float(found.facts["loss"]) < 0.15 * float(found.facts["loss_before"])


def test_what_probsurgery_costs_and_rebuilding() -> None:
    head, f = head_of("plain"), random(9, 6)
    made: Extra = module(ProbSurgery(steps=3).fit(pair_of(f, random(9, 6, seed=1)), head).classifier)
    assert made.kind == "probsurgery"
    assert {name: tensor.shape for name, tensor in made.extra_tensors().items()} == {"down": (128, 6), "up": (6, 128)}
    again = rebuild_surgery(head, made.extra_tensors(), kind="probsurgery")
    assert again.kind == "probsurgery"
    assert torch.equal(again(f), made(f))
    assert torch.equal(made(f), made(f)), "nothing is drawn any more"
