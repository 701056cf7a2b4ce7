"""Merges of linearised experts: they add up exactly in function space."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import orthomerge
from orthomerge.core.errors import IncompatibleError
from orthomerge.evaluation.metrics import counted, predict
from orthomerge.models.encoding import Encoding, encode
from orthomerge.models.families import family
from orthomerge.models.networks import LinearisedEncoder
from orthomerge.models.skeleton import quiet
from orthomerge.tuning.model import load_base

if TYPE_CHECKING:
    from collections.abc import Callable

    from orthomerge.data.task import Task
    from orthomerge.models.experts import Experts
    from orthomerge.models.model import Model

close = partial(torch.testing.assert_close, atol=2e-4, rtol=1e-4)  # weights are kept in float32: theta, not tau


@pytest.fixture
def experts(task: Task, base: Path, tune: Callable[..., dict[str, float]], tmp_path: Path) -> Experts:
    """Three of one task that went different ways."""
    for seed in range(3):
        tune(task, tmp_path / f"expert-{seed}", mode="linearised", seed=seed, steps=4, lr=1e-2)
    paths = {f"t{seed}": tmp_path / f"expert-{seed}" for seed in range(3)}
    return orthomerge.open(paths, base=base, check_base=False)


@pytest.fixture
def batch(task: Task, processors: dict[str, Any]) -> dict[str, torch.Tensor]:
    rows: dict[str, torch.Tensor] = processors[task.modality](task["val"].inputs[:8])
    return rows


def features(model: Model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    pooling = model.family.default_pooling
    encoder, read = model.encoder.runner(pooling)
    with torch.no_grad():
        return read.features(encoder, batch, pooling)


def merged(experts: Experts, scale: float) -> Model:
    return orthomerge.merge(experts, "task_arithmetic", scale=scale)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_the_merge_is_the_base_plus_what_every_expert_changed(
    scale: float, experts: Experts, batch: dict[str, torch.Tensor]
) -> None:
    """f_lin(x; theta_b + lambda sum tau_t) = f_0(x) + lambda sum (f_lin(x; theta_t) - f_0(x))."""
    plain = merged(experts, scale)
    together = features(plain.linearised(experts.base), batch)
    start = features(merged(experts, 0.0).linearised(experts.base), batch)
    each = [features(expert.linearised(experts.base), batch) - start for expert in experts.sources.values()]
    close(together, start + scale * torch.stack(each).sum(0))
    assert min(float(change.abs().max()) for change in each) > 0.02
    # The network with these weights is another model.
    assert float((together - features(plain, batch)).abs().max()) > 0.01


def test_at_the_base_it_is_the_base(experts: Experts, batch: dict[str, torch.Tensor]) -> None:
    model = merged(experts, 0.0)
    close(features(model.linearised(experts.base), batch), features(model, batch))


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
        close(features(model, batch), LinearisedEncoder(layout, pooling, encoder, tau)(batch))


def test_an_expert_alone_scores_as_it_did_in_training(
    task: Task, base: Path, tune: Callable[..., dict[str, float]], processors: dict[str, Any], tmp_path: Path
) -> None:
    metrics = tune(task, tmp_path / "expert", mode="linearised", steps=6, lr=1e-2)
    experts = orthomerge.open({"t": tmp_path / "expert"}, base=base)
    model = experts.teacher("t").linearised(experts.base)
    how = Encoding(None, "cpu", processor=processors[task.modality])
    scored = encode(model, task["val"], task="t", how=how)
    assert scored.labels is not None
    assert counted(predict(model.head("t"), scored.values), scored.labels).value == metrics["val_accuracy"]


def test_a_base_of_another_make(
    levels: Task, bases: Path, tune: Callable[..., dict[str, float]], tmp_path: Path
) -> None:
    tune(levels, tmp_path / "expert", mode="linearised", steps=1)
    experts = orthomerge.open({"t": tmp_path / "expert"}, base=bases / "vit")
    with quiet():
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig.from_pretrained(bases / "vit", num_hidden_layers=3)  # one more
        ViTForImageClassification(config).save_pretrained(tmp_path / "deeper")
    other = orthomerge.open({"t": tmp_path / "deeper"})
    with pytest.raises(IncompatibleError, match="only one of base and model has the tensor"):
        experts.teacher("t").linearised(other.base)


def test_opening_says_how_linearised_experts_are_scored(experts: Experts) -> None:
    assert any("'t0', 't1', 't2'" in note and "linearised" in note for note in experts.notes)
