"""WUDI-Merging against autograd and torch's own Adam, by its theorems, and at its edges."""

import pytest
import torch
from tests.merging.making import merge, normal

from orthomerge.merging.wudi import Wudi


def loss(tau: torch.Tensor, deltas: torch.Tensor) -> torch.Tensor:
    """L as the paper prints it, in the precision of its arguments."""
    terms = [torch.square((tau - tau_t) @ tau_t.T).sum() / torch.square(tau_t).sum() for tau_t in deltas]
    return torch.stack(terms).sum()


def oracle(deltas: torch.Tensor, *, steps: int, lr: float) -> torch.Tensor:
    """The authors' loop: autograd on the literal loss, and torch.optim.Adam."""
    tau = torch.nn.Parameter(deltas.sum(0))
    adam = torch.optim.Adam([tau], lr=lr)
    for _ in range(steps):
        adam.zero_grad()
        torch.autograd.backward(loss(tau, deltas))
        adam.step()
    return tau.detach()


def low_rank(T: int, m: int, k: int, *, rank: int) -> torch.Tensor:
    return torch.stack([normal(m, rank, seed=t, scale=0.1) @ normal(rank, k, seed=50 + t) for t in range(T)])


CASES = {
    "square": normal(3, 32, 32),
    "tall": normal(2, 60, 20),
    "wide": normal(3, 20, 60),
    "very wide": normal(2, 6, 80),
    "low rank": low_rank(3, 40, 64, rank=4),
    "large": normal(3, 24, 24, scale=0.1),
    "tiny": normal(3, 24, 24, scale=1e-4),
    "one row": normal(3, 1, 9),
    "one column": normal(3, 9, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_autograd_and_torch_adam(name: str) -> None:
    deltas = CASES[name]
    got = merge(Wudi(), deltas)
    torch.testing.assert_close(got, oracle(deltas, steps=300, lr=1e-5), atol=1e-6, rtol=0)
    # In float64 the literal loop leaves no doubt which of the two is off.
    torch.testing.assert_close(got.double(), oracle(deltas.double(), steps=300, lr=1e-5), atol=1e-6, rtol=0)


def test_one_expert_is_returned_bit_for_bit() -> None:
    deltas = normal(1, 12, 20)
    assert torch.equal(merge(Wudi(), deltas), deltas[0])
    assert loss(merge(Wudi(), deltas), deltas) == 0


def test_the_loss_falls() -> None:
    deltas = normal(4, 24, 24)
    losses = [float(loss(merge(Wudi(steps=steps), deltas), deltas)) for steps in (0, 30, 100, 300)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    assert torch.equal(merge(Wudi(steps=0), deltas), deltas.sum(0))


def test_reaches_the_minimum_when_given_time() -> None:
    # tau G = C, solved directly.
    deltas = normal(2, 6, 6, scale=1.0).double()
    grams = [tau.T @ tau / tau.norm() ** 2 for tau in deltas]
    C = deltas[0] @ grams[0] + deltas[1] @ grams[1]
    best = torch.linalg.solve(grams[0] + grams[1], C, left=False)
    got = merge(Wudi(steps=3000, lr=1e-2), deltas.float())
    assert loss(got.double(), deltas) <= 1.001 * loss(best, deltas)


def test_experts_on_disjoint_inputs_are_added() -> None:
    # Each reads its own half of the inputs: the sum interferes with neither, L is zero, and nothing moves.
    deltas = torch.zeros(2, 8, 10)
    deltas[0, :, :5], deltas[1, :, 5:] = normal(8, 5), normal(8, 5, seed=1)
    torch.testing.assert_close(merge(Wudi(), deltas), deltas.sum(0), atol=1e-6, rtol=0)


def test_elements_stay_near_the_sum() -> None:
    deltas = normal(3, 16, 16)
    assert (merge(Wudi(), deltas) - deltas.sum(0)).abs().max() < 300 * 1e-5 * 1.1


def test_experts_that_changed_nothing_have_no_say() -> None:
    deltas = normal(4, 10, 14)
    deltas[1] = deltas[3] = 0
    assert torch.equal(merge(Wudi(), deltas), merge(Wudi(), deltas[[0, 2]]))
    deltas[2] = 0
    assert torch.equal(merge(Wudi(), deltas), deltas[0])
    assert torch.equal(merge(Wudi(), torch.zeros(3, 5, 6)), torch.zeros(5, 6))


@pytest.mark.parametrize("shape", [(4, 7), (4, 3, 2, 5, 5), (4, 1, 5, 6), (4,)])
def test_other_tensors_stay_or_get_the_scaled_mean(shape: tuple[int, ...]) -> None:
    deltas = normal(*shape)
    assert torch.equal(merge(Wudi(), deltas), torch.zeros(shape[1:]))
    torch.testing.assert_close(merge(Wudi(scale=2.0, rest="mean"), deltas), 2 * deltas.mean(0))


@pytest.mark.parametrize(
    "key", ["embeddings.word_embeddings.weight", "shared.weight", "positional_embedding", "visual.proj"]
)
def test_tables_and_bare_projections_are_no_linear_weights(key: str) -> None:
    deltas = normal(2, 9, 4)
    assert torch.equal(merge(Wudi(), deltas, key=key), torch.zeros(9, 4))
    assert torch.equal(merge(Wudi(rest="mean"), deltas, key=key), deltas.mean(0))


def test_the_scale_multiplies_what_was_found() -> None:
    deltas = CASES["low rank"]
    torch.testing.assert_close(merge(Wudi(steps=20, scale=0.5), deltas), merge(Wudi(steps=20), deltas) / 2)
