"""Merges of linearised experts: they add up exactly in function space, and go wherever a merged model can."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import orthomerge
from orthomerge.errors import IncompatibleError
from orthomerge.evaluation.metrics import accuracy, predict
from orthomerge.features.extract import extract
from orthomerge.models.families import family
from orthomerge.recipe import Recipe
from orthomerge.tuning.linearised import linearised_features
from orthomerge.tuning.loading import load_linearised
from orthomerge.tuning.model import load_base

if TYPE_CHECKING:
    from collections.abc import Callable

    from orthomerge.data.task import Task
    from orthomerge.merged import Merged

close = partial(torch.testing.assert_close, atol=2e-4, rtol=1e-4)  # weights are kept in float32: theta, not tau
BASES = {"words": "bert", "levels": "vit"}


@pytest.fixture(params=BASES)
def task(request: pytest.FixtureRequest) -> Task:
    found: Task = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def base(task: Task, bases: Path) -> Path:
    return bases / BASES[task.name]


@pytest.fixture
def experts(task: Task, tune: Callable[..., dict[str, float]], tmp_path: Path) -> dict[str, Path]:
    """Three of one task that went different ways."""
    for seed in range(3):
        tune(task, tmp_path / f"expert-{seed}", mode="linearised", seed=seed, steps=4, lr=1e-2)
    return {f"t{seed}": tmp_path / f"expert-{seed}" for seed in range(3)}


@pytest.fixture
def batch(task: Task, processors: dict[str, Any]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = processors[task.modality](task["val"].inputs[:8])
    return found


def merged(experts: dict[str, Path], base: Path, out: Path, scale: float) -> Path:
    given = {task: str(path) for task, path in experts.items()}
    recipe = Recipe(
        experts=given, base=str(base), method="task_arithmetic", parameters={"scale": scale}, check_base=False
    )
    return orthomerge.merge(recipe, out=out).out


def alone(experts: dict[str, Path], base: Path, root: Path) -> dict[str, Merged]:
    found = {}
    for task, path in experts.items():
        recipe = Recipe(experts={task: str(path)}, method="average")
        found[task] = load_linearised(orthomerge.merge(recipe, out=root / f"alone-{task}").out, base=base)
    return found


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_the_merge_is_the_base_plus_what_every_expert_changed(
    scale: float, experts: dict[str, Path], base: Path, batch: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """f_lin(x; theta_b + lambda sum tau_t) = f_0(x) + lambda sum (f_lin(x; theta_t) - f_0(x))."""
    model = load_linearised(merged(experts, base, tmp_path / "merged", scale), base=base)
    with torch.no_grad():
        start = load_linearised(merged(experts, base, tmp_path / "start", 0.0), base=base).features(batch)
        each = [expert.features(batch) - start for expert in alone(experts, base, tmp_path).values()]
        close(model.features(batch), start + scale * torch.stack(each).sum(0))
        plain = orthomerge.load(tmp_path / "merged").features(batch)
    assert min(float(change.abs().max()) for change in each) > 0.02
    assert float((model.features(batch) - plain).abs().max()) > 0.01  # the network with these weights is another


def test_at_the_base_it_is_the_base(
    experts: dict[str, Path], base: Path, batch: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    out = merged(experts, base, tmp_path / "start", 0.0)
    with torch.no_grad():
        close(load_linearised(out, base=base).features(batch), orthomerge.load(out).features(batch))


def test_it_is_the_sum_of_the_jvps(
    experts: dict[str, Path], base: Path, batch: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    model = load_linearised(merged(experts, base, tmp_path / "merged", 1.0), base=str(base))
    found = family(base.name)
    encoder = load_base(base, found, model.pooling, eager=True)
    tuned = [load_base(path, found, model.pooling, eager=True) for path in experts.values()]
    tau = {
        name: sum((other.get_parameter(name) - parameter for other in tuned), torch.zeros_like(parameter)).detach()
        for name, parameter in encoder.named_parameters()
    }
    expected = linearised_features(found, model.pooling, encoder, tau)
    with torch.no_grad():
        close(model.features(batch), expected(batch))


def test_an_expert_alone_scores_as_it_did_in_training(
    task: Task, base: Path, tune: Callable[..., dict[str, float]], processors: dict[str, Any], tmp_path: Path
) -> None:
    metrics = tune(task, tmp_path / "expert", mode="linearised", steps=6, lr=1e-2)
    model = alone({"t": tmp_path / "expert"}, base, tmp_path)["t"]
    options: dict[str, Any] = {"task": "t", "batch": 8, "device": "cpu"}
    read = (model.encoder, model.family, model.pooling)
    features = extract(*read, task["val"], processors[task.modality], **options)
    assert features.labels is not None
    assert accuracy(predict(model.head("t"), features.values), features.labels) == metrics["val_accuracy"]
    with torch.no_grad():
        logits = model.logits("t", processors[task.modality](task["val"].inputs))
        close(logits, model.head("t")(features.values))


def test_a_base_of_another_make(
    levels: Task, bases: Path, tune: Callable[..., dict[str, float]], tmp_path: Path
) -> None:
    tune(levels, tmp_path / "expert", mode="linearised", steps=1)
    out = merged({"t": tmp_path / "expert"}, bases / "vit", tmp_path / "out", 1.0)
    with pytest.raises(IncompatibleError, match="only one has the parameter"):
        load_linearised(out, base=deeper(bases / "vit", tmp_path / "deeper"))


def deeper(base: Path, out: Path) -> Path:
    """A base with one layer more."""
    from orthomerge.models.load import quiet

    with quiet():
        from transformers import ViTConfig, ViTModel

        config = ViTConfig.from_pretrained(base)
        config.num_hidden_layers += 1
        ViTModel(config, add_pooling_layer=False).save_pretrained(out)
    return out


def test_the_plan_says_how_linearised_experts_are_read(experts: dict[str, Path], base: Path) -> None:
    recipe = Recipe(experts={task: str(path) for task, path in experts.items()}, base=str(base))
    notes = orthomerge.make_plan(recipe).notes
    assert any("'t0', 't1', 't2': linearised" in note and "load_linearised" in note for note in notes)
