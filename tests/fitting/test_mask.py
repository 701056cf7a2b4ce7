"""The mask over a vector: its gradient against autograd, soft and hard weights, what it reports, how it goes back."""

from __future__ import annotations

import pytest
import torch

from orthomerge.fitting.mask import Mask

P = 500


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(P, generator=torch.Generator().manual_seed(seed))


class Told(Mask):
    """A mask that keeps the gradient that its Adam was given."""

    def listen(self) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        adam = self._adam

        def update(values: torch.Tensor, place: slice, gradient: torch.Tensor, lr: float) -> None:
            seen.append(gradient.clone())
            type(adam).update(adam, values, place, gradient, lr)

        adam.update = update  # type: ignore[method-assign]
        return seen


@pytest.mark.parametrize(("cap", "decay"), [(1.0, 0.0), (1.0, 0.3), (4.0, 0.0), (4.0, 0.3)])
def test_the_gradient_is_autograds(cap: float, decay: float) -> None:
    base, delta, direction = numbers(0), numbers(1), numbers(2)
    mask = Told(base, delta, cap=cap, decay=decay, lr=0.1)
    mask.logits.copy_(2 * numbers(3))
    logits = mask.logits.clone().requires_grad_(True)
    seen, weights = mask.listen(), torch.empty(P)
    mask.step(direction, weights, 1.0)
    theta = base + cap * torch.sigmoid(logits) * delta
    loss = theta @ direction + decay * torch.sigmoid(logits).square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    torch.testing.assert_close(torch.cat(seen), logits.grad, rtol=1e-5, atol=1e-6)
    # Adam's first step is a whole rate against the sign.
    torch.testing.assert_close(mask.logits, logits.detach() - 0.1 * logits.grad.sign(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights, base + cap * torch.sigmoid(mask.logits) * delta)


def test_where_it_starts_and_its_ends() -> None:
    base, delta, weights = numbers(0), numbers(1), torch.empty(P)
    for start, cap in ((0.5, 1.0), (0.25, 4.0), (0.9, 1.0)):
        Mask(base, delta, start=start, cap=cap).write(weights)
        torch.testing.assert_close(weights, base + start * cap * delta)
    mask = Mask(base, delta)
    mask.restore(torch.full((P,), 100.0))
    mask.write(weights)
    torch.testing.assert_close(weights, base + delta)
    mask.restore(torch.full((P,), -100.0))
    mask.write(weights)
    torch.testing.assert_close(weights, base)


def test_a_hard_mask_is_all_or_nothing_and_learns_straight_through() -> None:
    base, delta, weights = numbers(0), numbers(1), torch.empty(P)
    soft, hard = Mask(base, delta, cap=2.0), Told(base, delta, cap=2.0, form="hard")
    for each in (soft, hard):
        each.restore(numbers(3))
    on = base + 2 * delta * (numbers(3) > 0)
    hard.write(weights)
    torch.testing.assert_close(weights, on)
    soft.write_as(weights, "hard")
    torch.testing.assert_close(weights, on)
    hard.write_as(weights, "soft")
    torch.testing.assert_close(weights, base + 2 * delta * torch.sigmoid(numbers(3)))
    seen = hard.listen()
    hard.step(numbers(2), weights, 0.5)
    slope = torch.sigmoid(numbers(3)) * torch.sigmoid(-numbers(3))
    torch.testing.assert_close(torch.cat(seen), numbers(2) * 2 * delta * slope)
    torch.testing.assert_close(weights, base + 2 * delta * (hard.logits > 0))


def test_measures_count_elements_that_some_expert_changed() -> None:
    delta = numbers(1)
    delta[:100] = 0
    mask = Mask(numbers(0), delta)
    assert mask.measures() == {"masked": 0.0}
    logits = torch.ones(P)
    logits[:200] = -1
    mask.restore(logits)
    assert mask.measures() == {"masked": 100 / 400}
    assert mask.size == P
    assert Mask(numbers(0), torch.zeros(P)).measures() == {"masked": 0.0}


def test_restored_and_loaded() -> None:
    def make() -> Mask:
        return Mask(numbers(0), numbers(1), decay=1e-3)

    mask, weights = make(), torch.empty(P)
    mask.step(numbers(2), weights, 1.0)
    kept, before = mask.kept(), weights.clone()
    state = mask.state()
    state = {
        "logits": state["logits"].clone(),
        "adam": {k: torch.as_tensor(v).clone() for k, v in state["adam"].items()},
    }
    mask.step(numbers(3), weights, 1.0)
    other, again = make(), torch.empty(P)
    other.load(state)
    other.write(again)
    assert torch.equal(again, before)
    other.step(numbers(3), again, 1.0)
    assert torch.equal(again, weights)
    mask.restore(kept)
    mask.write(weights)
    assert torch.equal(weights, before)
