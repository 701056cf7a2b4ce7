"""The tangent model: f at tau = 0, affine in tau, and its derivative that of the network."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from orthomerge.models.families import family
from orthomerge.models.networks import LinearisedEncoder, deltas_between
from orthomerge.tuning.model import load_base

if TYPE_CHECKING:
    from pathlib import Path

    from orthomerge.data.task import Task
    from orthomerge.models.family import Family

# Weights are in float64, but transformers takes the softmax of eager attention in float32.
close = partial(torch.testing.assert_close, atol=2e-6, rtol=1e-5)
Setting = tuple["Family", str, nn.Module, dict[str, torch.Tensor]]


def load(bases: Path, name: str, pooling: str = "cls") -> nn.Module:
    return load_base(bases / name, family(name), pooling).module


@pytest.fixture(params=["bert-pooler", "bert-cls", "vit-cls", "clip-projection"])
def setting(
    request: pytest.FixtureRequest, bases: Path, words: Task, levels: Task, processors: dict[str, Any]
) -> Setting:
    """Family, pooling, encoder in float64, batch."""
    name, pooling = request.param.split("-")
    found = family(name)
    task = words if name == "bert" else levels
    batch = processors[task.modality](task["train"].inputs[:5])
    encoder = load(bases, name, pooling)
    doubles = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    return found, pooling, encoder.double(), doubles


def direction(encoder: nn.Module, seed: int, size: float = 0.1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        for name, parameter in encoder.named_parameters()
    }


def test_at_the_base_it_is_the_network(setting: Setting) -> None:
    found, pooling, encoder, batch = setting
    with torch.no_grad():
        plain = found.features(encoder, batch, pooling)  # before attention is switched to eager
        close(LinearisedEncoder(found, pooling, encoder)(batch), plain)


def test_it_is_affine_in_tau(setting: Setting) -> None:
    found, pooling, encoder, batch = setting
    one, other = direction(encoder, 1), direction(encoder, 2)
    both = {name: 0.7 * one[name] - 1.8 * other[name] for name in one}
    change = [LinearisedEncoder(found, pooling, encoder, tau).change(batch) for tau in (one, other, both)]
    close(change[2], 0.7 * change[0] - 1.8 * change[1])
    assert change[0].abs().max() > 1e-3


def test_it_is_the_derivative_of_the_network(setting: Setting) -> None:
    found, pooling, encoder, batch = setting
    tau = direction(encoder, 3)
    change = LinearisedEncoder(found, pooling, encoder, tau).change(batch)
    encoder.set_attn_implementation("sdpa")  # type: ignore[operator]
    start = {name: parameter.detach().clone() for name, parameter in encoder.named_parameters()}
    ends = []
    with torch.no_grad():
        for step in (1e-5, -1e-5):
            for name, parameter in encoder.named_parameters():
                parameter.copy_(start[name] + step * tau[name])
            ends.append(found.features(encoder, batch, pooling))
    close(change, (ends[0] - ends[1]) / 2e-5)


def test_its_gradient_is_the_transposed_jacobian(setting: Setting) -> None:
    """<u, J tau> is linear in tau, so its gradient g satisfies <g, tau> = <u, J tau>."""
    found, pooling, encoder, batch = setting
    model = LinearisedEncoder(found, pooling, encoder)
    tau = direction(encoder, 4)
    with torch.no_grad():
        for name, delta in zip(model.names, model.deltas, strict=True):
            delta.copy_(tau[name])
    change = model.change(batch)
    value = (change * torch.linspace(-1, 1, change.numel(), dtype=torch.float64).reshape(change.shape)).sum()
    value.backward()  # type: ignore[no-untyped-call]
    inner = sum((delta.grad * delta.detach()).sum() for delta in model.deltas if delta.grad is not None)
    close(inner, value.detach())
    assert all(parameter.grad is None for parameter in encoder.parameters())


def test_train_mode_has_no_dropout(bases: Path, words: Task, processors: dict[str, Any]) -> None:
    found = family("bert")
    model = LinearisedEncoder(found, "mean", load(bases, "bert")).train()
    batch = processors["text"](words["train"].inputs[:5])
    assert model.training
    assert torch.equal(model(batch), model(batch))


def test_works_without_gradients_of_any_kind(bases: Path, words: Task, processors: dict[str, Any]) -> None:
    found = family("bert")
    encoder = load(bases, "bert")
    features = LinearisedEncoder(found, "mean", encoder, direction(encoder, 5))
    batch = processors["text"](words["train"].inputs[:5])
    with torch.inference_mode():
        inside = features(batch)
    with torch.no_grad():
        assert torch.equal(features(batch), inside)


def test_weights_of_the_tuned_encoder_are_base_plus_tau(bases: Path) -> None:
    found = family("vit")
    base = load(bases, "vit")
    tau = direction(base, 6)
    before = {name: parameter.clone() for name, parameter in base.named_parameters()}
    tuned = LinearisedEncoder(found, "cls", base, tau).tuned()
    for name, parameter in tuned.named_parameters():
        assert torch.equal(parameter, before[name] + tau[name])
        assert torch.equal(base.get_parameter(name), before[name])
    for name, delta in deltas_between(base, tuned).items():
        close(delta, tau[name], atol=1e-6, rtol=0)
