"""Gates of singular components: all of them at once are the task vector, and gradients are autograd's."""

from __future__ import annotations

import torch

from orthomerge.fitting.components import Components
from orthomerge.fitting.layout import Layout

LAYOUT = Layout({"layer.weight": (3, 5), "tall.weight": (6, 2), "embeddings.word": (7, 4), "bias": (4,), "scalar": ()})
T = 3


def flat(seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return LAYOUT.flat({name: torch.randn(shape, generator=random) for name, shape in LAYOUT.shapes.items()})


def vectors() -> torch.Tensor:
    return torch.stack([flat(seed) for seed in range(1, T + 1)])


def make(lr: float = 0.1) -> Components:
    return Components(flat(0), vectors(), LAYOUT, lr=lr)


def test_gates_are_one_a_component_and_one_for_what_is_no_matrix() -> None:
    assert make().size == T * (3 + 2 + 1 + 1 + 1)


def test_no_gate_is_the_origin_and_all_are_the_vectors() -> None:
    gates, weights = make(), torch.empty(LAYOUT.size)
    gates.write(weights)
    assert torch.equal(weights, flat(0))
    gates.values[:] = torch.tensor([0.5, -1.0, 2.0])[:, None]
    gates.write(weights)
    expected = flat(0) + torch.tensor([0.5, -1.0, 2.0]) @ vectors()
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-5)


def test_one_component_alone() -> None:
    gates, weights = make(), torch.empty(LAYOUT.size)
    gates.values[1, 0] = 1.0
    gates.write(weights)
    tau = vectors()[1][LAYOUT.places["layer.weight"]].view(3, 5)
    U, s, Vh = torch.linalg.svd(tau, full_matrices=False)
    change = (weights - flat(0))[LAYOUT.places["layer.weight"]].view(3, 5)
    torch.testing.assert_close(change, s[0] * U[:, :1] @ Vh[:1], rtol=1e-5, atol=1e-5)
    assert torch.linalg.matrix_rank(change) == 1


def test_gradients_are_those_of_autograd() -> None:
    gates = make()
    gradient = flat(9)
    values = torch.randn(gates.values.shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    total = torch.zeros(())
    at = 0
    for name, place in LAYOUT.places.items():
        shape, part = LAYOUT.shapes[name], vectors()[:, place]
        if name.endswith(".weight"):
            U, s, Vh = torch.linalg.svd(part.view(T, *shape), full_matrices=False)
            count = s.shape[1]
            made = torch.einsum("tmr,tr,trk->mk", U, s * values[:, at : at + count], Vh).reshape(-1)
        else:
            count, made = 1, values[:, at] @ part
        total = total + made @ gradient[place]
        at += count
    (expected,) = torch.autograd.grad(total, values)
    torch.testing.assert_close(gates.gradient(gradient), expected, rtol=1e-4, atol=1e-5)


def test_a_step_goes_down_and_can_be_taken_back() -> None:
    gates, weights = make(), torch.empty(LAYOUT.size)
    gates.write(weights)
    kept, target = gates.kept(), flat(0) + vectors()[0]
    before = float((weights - target).norm())
    for _ in range(50):
        gates.step(weights - target, weights, 1.0)
    assert float((weights - target).norm()) < 0.2 * before
    state = gates.state()
    again = make()
    again.load(state)
    assert torch.equal(again.values, gates.values)
    gates.restore(kept)
    gates.write(weights)
    assert torch.equal(weights, flat(0))
