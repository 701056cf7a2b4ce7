"""Gates: weights by their formulas, gradients against autograd, steps, and states that continue to the bit."""

import pytest
import torch
from tests.fitting.making import Steps, numbers

from orthomerge.fitting.gates import Coefficients, Free, Mask
from orthomerge.fitting.layout import Layout

P = 500
T = 3
# Rows, matrices, a table, a kernel, and tensors that are no matrices.
LAYOUT = Layout(
    {
        "layer.weight": (3, 5),
        "tall.weight": (6, 2),
        "embeddings.word": (7, 4),
        "kernel": (2, 3, 2, 2),
        "bias": (4,),
        "scalar": (),
    }
)


def flat(seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return LAYOUT.flat({name: torch.randn(shape, generator=random) for name, shape in LAYOUT.shapes.items()})


def vectors() -> torch.Tensor:
    return torch.stack([flat(seed) for seed in range(1, T + 1)])


def coefficients(*, by_tensor: bool = True, clamp: bool = True) -> Coefficients:
    return Coefficients(flat(0), vectors(), LAYOUT, by_tensor=by_tensor, start=0.3, lr=0.1, clamp=clamp)


def test_free_weights_move_as_in_adamw() -> None:
    origin = numbers(0, P)
    steps = Steps(Free(origin, lr=0.01, decay=0.5), P)
    assert torch.equal(steps.weights, origin)
    moved = torch.zeros(P, requires_grad=True)
    torchs = torch.optim.AdamW([moved], lr=0.01, weight_decay=0.5, eps=1e-15)
    for step in range(10):
        moved.grad = numbers(step, P)
        torchs.step()
        steps.take(numbers(step, P))
    torch.testing.assert_close(steps.weights, origin + moved.detach(), rtol=1e-5, atol=1e-6)
    assert steps.gates.measures()["moved"] == pytest.approx(float(moved.detach().norm() / origin.norm()))


@pytest.mark.parametrize(("cap", "penalty"), [(1.0, 0.0), (1.0, 0.3), (4.0, 0.0), (4.0, 0.3)])
def test_the_gradient_of_a_mask_is_autograds(cap: float, penalty: float) -> None:
    base, delta, direction = (numbers(seed, P) for seed in range(3))
    mask = Mask(base, delta, cap=cap, penalty=penalty, lr=0.1)
    mask.values.copy_(2 * numbers(3, P))
    logits = mask.values.clone().requires_grad_(True)
    theta = base + cap * torch.sigmoid(logits) * delta
    loss = theta @ direction + penalty * torch.sigmoid(logits).square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    torch.testing.assert_close(mask.gradient(direction.clone()), logits.grad, rtol=1e-5, atol=1e-6)
    # Adam's first step is a whole rate against the sign.
    weights = Steps(mask, P).take(direction)
    torch.testing.assert_close(mask.values, logits.detach() - 0.1 * logits.grad.sign(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights, base + cap * torch.sigmoid(mask.values) * delta)


def test_where_a_mask_starts_and_its_ends() -> None:
    base, delta, weights = numbers(0, P), numbers(1, P), torch.empty(P)
    for start, cap in ((0.5, 1.0), (0.25, 4.0), (0.9, 1.0)):
        Mask(base, delta, start=start, cap=cap).write(weights)
        torch.testing.assert_close(weights, base + start * cap * delta)
    mask = Mask(base, delta)
    for logit, end in ((100.0, base + delta), (-100.0, base)):
        mask.values.fill_(logit)
        mask.write(weights)
        torch.testing.assert_close(weights, end)


def test_a_hard_mask_is_all_or_nothing_and_learns_straight_through() -> None:
    base, delta, weights = numbers(0, P), numbers(1, P), torch.empty(P)
    soft, hard = Mask(base, delta, cap=2.0), Mask(base, delta, cap=2.0, form="hard")
    for each in (soft, hard):
        each.values.copy_(numbers(3, P))
    on = base + 2 * delta * (numbers(3, P) > 0)
    hard.write(weights)
    torch.testing.assert_close(weights, on)
    soft.write_as(weights, "hard")
    torch.testing.assert_close(weights, on)
    hard.write_as(weights, "soft")
    torch.testing.assert_close(weights, base + 2 * delta * torch.sigmoid(numbers(3, P)))
    slope = torch.sigmoid(numbers(3, P)) * torch.sigmoid(-numbers(3, P))
    torch.testing.assert_close(hard.gradient(numbers(2, P)), numbers(2, P) * 2 * delta * slope)
    weights = Steps(hard, P).take(numbers(2, P), 0.5)
    torch.testing.assert_close(weights, base + 2 * delta * (hard.values > 0))


def test_measures_count_elements_that_some_expert_changed() -> None:
    delta = numbers(1, P)
    delta[:100] = 0
    mask = Mask(numbers(0, P), delta)
    assert mask.measures() == {"masked": 0.0}
    mask.values[:] = 1
    mask.values[:200] = -1
    assert mask.measures() == {"masked": 100 / 400}
    by_tensor = mask.masked_by_tensor(Layout({"a": (64, 2), "b": (372,)}))
    assert by_tensor == {"a": {"masked": 28, "of": 28}, "b": {"masked": 72, "of": 372}}
    assert Mask(numbers(0, P), torch.zeros(P)).measures() == {"masked": 0.0}


def expected(values: torch.Tensor, *, clamp: bool) -> torch.Tensor:
    """The formula of coefficients, element by element through an index of tensors."""
    index = torch.zeros(LAYOUT.size, dtype=torch.int64)
    for number, place in enumerate(LAYOUT.places.values()):
        index[place] = number % values.shape[1]
    total = flat(0)
    for number in range(T):
        own = values.clamp(0, 1) if clamp else values
        total = total + own[number][index] * flat(number + 1)
    return total


@pytest.mark.parametrize("by_tensor", [True, False])
@pytest.mark.parametrize("clamp", [True, False])
def test_coefficients_and_their_gradient(by_tensor: bool, clamp: bool) -> None:
    gates, weights = coefficients(by_tensor=by_tensor, clamp=clamp), torch.empty(LAYOUT.size)
    assert gates.values.shape == (T, len(LAYOUT.shapes) if by_tensor else 1)
    gates.values.copy_(0.5 + numbers(9, *gates.values.shape))
    values = gates.values.clone().requires_grad_(True)
    theta = expected(values, clamp=clamp)
    gates.write(weights)
    torch.testing.assert_close(weights, theta.detach())
    direction = flat(7)
    (theta @ direction).backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    torch.testing.assert_close(gates.gradient(direction), values.grad)
    weights = Steps(gates, LAYOUT.size).take(direction, 0.5)
    torch.testing.assert_close(gates.values, values.detach() - 0.05 * values.grad.sign())
    torch.testing.assert_close(weights, expected(gates.values, clamp=clamp))


def test_bounds_stop_the_gradient_and_count_as_the_bound() -> None:
    gates = coefficients()
    gates.values.fill_(0.2)
    gates.values[0, :4], gates.values[1, 0], gates.values[2, 3] = torch.tensor([-0.5, 0.0, 0.5, 1.0]), 1.5, -1.0
    stopped = (gates.gradient(flat(7)) == 0).nonzero().tolist()
    assert stopped == [[0, 0], [1, 0], [2, 3]]
    assert gates.measures()["least"] == 0.0
    assert gates.measures()["most"] == 1.0
    assert gates.clamped()[0, :4].tolist() == [0.0, 0.0, 0.5, 1.0]
    assert coefficients().measures() == pytest.approx({"least": 0.3, "mean": 0.3, "most": 0.3})
