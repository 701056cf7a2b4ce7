"""The tangent model: f at tau = 0, affine in tau, its derivative that of the network; its merges add up exactly."""

from functools import partial
from pathlib import Path

import pytest
import torch
from tests.tuning.conftest import PROCESSORS, Tune
from torch import nn

import orthomerge
from orthomerge.core.errors import IncompatibleError
from orthomerge.data.task import Task
from orthomerge.evaluation.metrics import counted, predict
from orthomerge.models.encoding import Encoding, encode
from orthomerge.models.experts import Experts
from orthomerge.models.families import family
from orthomerge.models.family import Family
from orthomerge.models.model import Model
from orthomerge.models.networks import LinearisedEncoder, deltas_between
from orthomerge.models.skeleton import quiet
from orthomerge.tuning.model import load_base

# Weights are in float64, but transformers takes the softmax of eager attention in float32.
close = partial(torch.testing.assert_close, atol=2e-6, rtol=1e-5)
Setting = tuple[Family, str, nn.Module, dict[str, torch.Tensor]]


def load(bases: Path, name: str, pooling: str = "cls") -> nn.Module:
    return load_base(bases / name, family(name), pooling).module


@pytest.fixture(params=["bert-pooler", "bert-cls", "vit-cls", "clip-projection"])
def setting(request: pytest.FixtureRequest, bases: Path, words: Task, levels: Task) -> Setting:
    """Family, pooling, encoder in float64, batch."""
    name, pooling = request.param.split("-")
    found = family(name)
    task = words if name == "bert" else levels
    batch = PROCESSORS[task.modality](task["train"].inputs[:5])
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


def test_no_dropout_in_train_mode_and_no_need_of_gradients(bases: Path, words: Task) -> None:
    found = family("bert")
    encoder = load(bases, "bert")
    model = LinearisedEncoder(found, "mean", encoder).train()
    batch = PROCESSORS["text"](words["train"].inputs[:5])
    assert model.training
    assert torch.equal(model(batch), model(batch))
    features = LinearisedEncoder(found, "mean", encoder, direction(encoder, 5))
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


near = partial(torch.testing.assert_close, atol=2e-4, rtol=1e-4)  # weights are kept in float32: theta, not tau


@pytest.fixture
def experts(task: Task, base: Path, tune: Tune, tmp_path: Path) -> Experts:
    """Three of one task that went different ways."""
    for seed in range(3):
        tune(task, tmp_path / f"expert-{seed}", mode="linearised", seed=seed, steps=4, lr=1e-2)
    paths = {f"t{seed}": tmp_path / f"expert-{seed}" for seed in range(3)}
    return orthomerge.open(paths, base=base, check_base=False)


@pytest.fixture
def batch(task: Task) -> dict[str, torch.Tensor]:
    rows: dict[str, torch.Tensor] = PROCESSORS[task.modality](task["val"].inputs[:8])
    return rows


def features(model: Model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    pooling = model.family.default_pooling
    encoder, read = model.encoder.runner(pooling)
    with torch.no_grad():
        return read.features(encoder, batch, pooling)


def merged(experts: Experts, scale: float) -> Model:
    return orthomerge.merge(experts, "task_arithmetic", scale=scale)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_a_merge_adds_what_experts_changed(scale: float, experts: Experts, batch: dict[str, torch.Tensor]) -> None:
    """f_lin(x; theta_b + lambda sum tau_t) = f_0(x) + lambda sum (f_lin(x; theta_t) - f_0(x))."""
    plain = merged(experts, scale)
    together = features(plain.linearised(experts.base), batch)
    start = features(merged(experts, 0.0).linearised(experts.base), batch)
    each = [features(expert.linearised(experts.base), batch) - start for expert in experts.sources.values()]
    near(together, start + scale * torch.stack(each).sum(0))
    assert min(float(change.abs().max()) for change in each) > 0.02
    # The network with these weights is another model.
    assert float((together - features(plain, batch)).abs().max()) > 0.01


def test_the_base_and_the_note_on_scores(experts: Experts, batch: dict[str, torch.Tensor]) -> None:
    model = merged(experts, 0.0)
    near(features(model.linearised(experts.base), batch), features(model, batch))
    assert any("'t0', 't1', 't2'" in note and "linearised" in note for note in experts.notes)


def test_it_is_the_sum_of_the_jvps(experts: Experts, base: Path, batch: dict[str, torch.Tensor]) -> None:
    model, layout = merged(experts, 1.0).linearised(experts.base), family(base.name)
    pooling = layout.default_pooling
    encoder = load_base(base, layout, pooling).module
    paths = [Path(expert.path) for expert in experts.opening.experts.values()]
    tuned = [load_base(path, layout, pooling).module for path in paths]
    tau = {
        name: sum((other.get_parameter(name) - parameter for other in tuned), torch.zeros_like(parameter)).detach()
        for name, parameter in encoder.named_parameters()
    }
    with torch.no_grad():
        near(features(model, batch), LinearisedEncoder(layout, pooling, encoder, tau)(batch))


def test_an_expert_alone_scores_as_it_did_in_training(task: Task, base: Path, tune: Tune, tmp_path: Path) -> None:
    metrics = tune(task, tmp_path / "expert", mode="linearised", steps=6, lr=1e-2)
    experts = orthomerge.open({"t": tmp_path / "expert"}, base=base)
    model = experts.teacher("t").linearised(experts.base)
    how = Encoding(None, "cpu", processor=PROCESSORS[task.modality])
    scored = encode(model, task["val"], task="t", how=how)
    assert scored.labels is not None
    assert counted(predict(model.head("t"), scored.values), scored.labels).value == metrics["val_accuracy"]


def test_a_base_of_another_make(levels: Task, bases: Path, tune: Tune, tmp_path: Path) -> None:
    tune(levels, tmp_path / "expert", mode="linearised", steps=1)
    experts = orthomerge.open({"t": tmp_path / "expert"}, base=bases / "vit")
    with quiet():
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig.from_pretrained(bases / "vit", num_hidden_layers=3)  # one more
        ViTForImageClassification(config).save_pretrained(tmp_path / "deeper")
    other = orthomerge.open({"t": tmp_path / "deeper"})
    with pytest.raises(IncompatibleError, match="only one of base and model has the tensor"):
        experts.teacher("t").linearised(other.base)
