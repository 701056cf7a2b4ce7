"""Merges of adapters against peft's own `add_weighted_adapter`: which of its ways are which of our methods, exactly.

Its `cat`, `svd` and `*_svd` ways work on the products, as we do: they agree at full rank. Its `linear`, `ties` and
`dare_*` ways merge A and B apart, which is no merge of the products: they agree with our methods on the factors alone.
"""

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.merging.making import merged
from torch import nn

from orthomerge.files.lora import read_adapter
from orthomerge.merging.dare import keep_mask
from orthomerge.merging.kinds import Site
from orthomerge.merging.methods import make_method
from orthomerge.merging.vectors import InMemory, TaskVector, TaskVectors

TASKS, WEIGHTS, DENSITY = ("a", "b", "c"), (0.5, 0.8, 0.3), 0.4
LAYERS = {"first": (14, 9), "second": (9, 14)}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A peft model with three adapters of random factors (rsLoRA among them), each saved in a folder of its name."""
    from peft import LoraConfig, get_peft_model

    folder, alphas = tmp_path_factory.mktemp("adapters"), {"a": 3, "b": 8, "c": 5}
    configs = {
        task: LoraConfig(r=4, lora_alpha=alphas[task], target_modules=list(LAYERS), use_rslora=task == "b")
        for task in TASKS
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = get_peft_model(
            nn.ModuleDict({name: nn.Linear(k, m) for name, (m, k) in LAYERS.items()}), configs["a"], adapter_name="a"
        )
        for task in ("b", "c"):
            model.add_adapter(task, configs[task])
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(str(folder))
    return model, folder


@pytest.fixture
def vectors(adapted: tuple[Any, Path]) -> TaskVectors:
    base = InMemory({f"{name}.weight": torch.zeros(shape) for name, shape in LAYERS.items()})
    sources = {task: read_adapter(adapted[1] / task) for task in TASKS}
    return TaskVectors({task: TaskVector(base, ((1.0, source),)) for task, source in sources.items()})


def ours(method: str, options: dict[str, Any], vectors: TaskVectors) -> dict[str, torch.Tensor]:
    return merged(make_method(method, options, tasks=TASKS), vectors)


def layer(model: Any, name: str) -> Any:
    return model.base_model.model.get_submodule(name)


def theirs(model: Any, way: str, **options: Any) -> dict[str, torch.Tensor]:
    """The delta of every layer by one of peft's ways, at full rank where it has one."""
    name = f"merged-{way}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.add_weighted_adapter(list(TASKS), list(WEIGHTS), name, combination_type=way, **options)
    found = {f"{each}.weight": layer(model, each).get_delta_weight(name).detach() for each in LAYERS}
    model.delete_adapter(name)
    return found


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        torch.testing.assert_close(tensor, other[key], rtol=1e-4, atol=1e-4)


FULL = {"svd_rank": 9}
SAME: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "cat": ("task_arithmetic", {"scale": WEIGHTS}, {}),
    "svd": ("task_arithmetic", {"scale": WEIGHTS}, FULL),
    "ties_svd": ("ties@peft", {"density": DENSITY, "weights": WEIGHTS}, {**FULL, "density": DENSITY}),
    "dare_linear_svd": ("dare@peft", {"density": DENSITY, "weights": WEIGHTS}, {**FULL, "density": DENSITY}),
    "dare_ties_svd": ("dare_ties@peft", {"density": DENSITY, "weights": WEIGHTS}, {**FULL, "density": DENSITY}),
}


@pytest.fixture
def our_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peft's random pruning with our draws: element i of tensor k in expert t, in the order in which peft asks."""
    from peft.utils import merge_utils

    order: Iterator[tuple[str, str]] = iter([(name, task) for name in LAYERS for task in TASKS])

    def pruned(tensor: torch.Tensor, density: float, rescale: bool) -> torch.Tensor:
        name, task = next(order)
        site = Site(f"{name}.weight", tuple(tensor.shape), 0, TASKS)
        mask = keep_mask(site, task, tensor.numel(), keep=density, seed=0).reshape(tensor.shape)
        return tensor * mask / (density if rescale else 1)

    monkeypatch.setattr(merge_utils, "random_pruning", pruned)


@pytest.mark.usefixtures("our_draws")
@pytest.mark.parametrize("way", SAME)
def test_ways_that_work_on_the_product(way: str, adapted: tuple[Any, Path], vectors: TaskVectors) -> None:
    method, options, asked = SAME[way]
    close(ours(method, options, vectors), theirs(adapted[0], way, **asked))


@pytest.mark.parametrize("way", ["linear", "ties"])
def test_ways_that_merge_the_factors(way: str, adapted: tuple[Any, Path], vectors: TaskVectors) -> None:
    """Each factor is a tensor of its own, weighted by sqrt(weight * scaling): our methods then give peft's factors."""
    model = adapted[0]
    for name in LAYERS:
        factors = {
            task: {side: getattr(layer(model, name), f"lora_{side}")[task].weight.data for side in "AB"}
            for task in TASKS
        }
        weights = tuple(
            math.sqrt(weight * layer(model, name).scaling[task]) for task, weight in zip(TASKS, WEIGHTS, strict=True)
        )
        zero = {side: torch.zeros_like(tensor) for side, tensor in factors["a"].items()}
        apart = TaskVectors({task: TaskVector.between(zero, pair) for task, pair in factors.items()})
        method = ("task_arithmetic", {"scale": weights}) if way == "linear" else ("ties@peft", {"weights": weights})
        found = ours(*method, apart)
        expected = theirs(model, way, **({"density": 0.2} if way == "ties" else {}))
        torch.testing.assert_close(found["B"] @ found["A"], expected[f"{name}.weight"], rtol=1e-4, atol=1e-4)
    # And that is no merge of the products: sums of products are not products of sums.
    if way == "linear":
        product = ours("task_arithmetic", {"scale": WEIGHTS}, vectors)
        assert not torch.allclose(product["first.weight"], theirs(model, way)["first.weight"], atol=0.5)


def test_knots_of_adapters(vectors: TaskVectors) -> None:
    plain = ours("task_arithmetic", {"scale": WEIGHTS}, vectors)
    close(ours("knots", {"merger": "task_arithmetic", "scale": list(WEIGHTS)}, vectors), plain)
    for merger in ("ties", "dare_ties", "dare_ties@peft"):
        found = ours("knots", {"merger": merger}, vectors)
        assert all(torch.linalg.matrix_rank(delta) <= 12 for delta in found.values())


def test_factors_are_those_of_the_product(vectors: TaskVectors) -> None:
    for key in vectors.shapes:
        pairs = vectors.factors(key)
        assert pairs is not None
        for (left, right), vector in zip(pairs, vectors.vectors.values(), strict=True):
            assert left.shape[1] == right.shape[0] == 4
            torch.testing.assert_close(left @ right, vector[key], rtol=1e-5, atol=1e-5)
