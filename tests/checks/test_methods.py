"""Contracts that every row of the method table keeps, whatever it computes."""

from typing import Any, cast

import pytest
import torch

from orthomerge.core.errors import RecipeError
from orthomerge.core.schema import schema
from orthomerge.merging.kinds import Block, SurveyMethod, TensorMethod
from orthomerge.merging.methods import METHODS, find_method, make_method, method_maker
from orthomerge.merging.stream import merge_blocks, prepare
from orthomerge.merging.vectors import Difference, InMemory, TaskVector, TaskVectors

State = dict[str, torch.Tensor]

# Options under which one expert must come out as it went in.
FAITHFUL: dict[str, dict[str, Any]] = {
    "average": {},
    "task_arithmetic": {"scale": 1.0},
    "ties": {"density": 1.0, "scale": 1.0},
    "ties_sum": {"density": 1.0, "scale": 1.0},
    "ties_per_tensor": {"density": 1.0, "scale": 1.0},
    "ties@mergekit": {"density": 1.0},
    "ties@peft": {"density": 1.0},
    "ties@fusionbench": {"density": 1.0, "scale": 1.0},
    "dare": {"drop": 0.0, "scale": 1.0},
    "dare_ties": {"drop": 0.0, "density": 1.0, "scale": 1.0},
    "dare@mergekit": {"density": 1.0},
    "dare_ties@mergekit": {"density": 1.0},
    "dare@peft": {"density": 1.0},
    "dare_ties@peft": {"density": 1.0},
    "breadcrumbs": {"density": 1.0, "gamma": 0.0, "scale": 1.0},
    "magmax": {"scale": 1.0},
    "consensus": {"agree": 1, "scale": 1.0},
    "tsv_m": {"scale": 1.0},
    "knots": {"merger": "ties", "density": 1.0, "scale": 1.0},
    "wudi": {"rest": "mean"},
}
# Why the others cannot: the definition says otherwise.
UNFAITHFUL = {
    "model_stock": "needs two experts: their angle decides",
    "slerp": "needs two experts: it goes from one to the other",
    "iso_c": "makes all singular values equal, for one expert too",
    "iso_cts": "makes all singular values equal, for one expert too",
}
# Options for all other contracts: few steps; of the mergers within KnOTS the one that surveys and draws.
QUICK: dict[str, dict[str, Any]] = {"wudi": {"steps": 5}, "knots": {"merger": "dare_ties"}}


def state(seed: int, scale: float) -> State:
    """Names and shapes of all kinds: matrices, a table, vectors, a convolution, a scalar, nothing at all."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embeddings.word.weight": (23, 8),
        "layer.0.weight": (12, 8),
        "layer.0.bias": (12,),
        "layer.1.weight": (8, 12),
        "patch.weight": (4, 3, 2, 2),
        "scale": (),
        "empty": (0, 4),
    }
    return {key: scale * torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def experts_of(base: State, count: int, *, scale: float = 0.1) -> dict[str, State]:
    names = ("ann", "bob", "eve")[:count]
    return {
        name: {key: base[key] + delta for key, delta in state(seed, scale).items()}
        for seed, name in enumerate(names, start=1)
    }


def vectors_of(base: State, experts: dict[str, State], *, tile: int = 1 << 18) -> TaskVectors:
    weights = InMemory(base)
    return TaskVectors(
        {name: TaskVector(weights, ((1.0, Difference(InMemory(expert))),)) for name, expert in experts.items()},
        tile=tile,
    )


def merged(method: TensorMethod | SurveyMethod, vectors: TaskVectors, *, workers: int = 1) -> State:
    def finish(block: Block, weights: torch.Tensor) -> tuple[str, torch.Tensor]:
        assert weights.dtype == torch.float32
        assert weights.shape == block.base.shape
        return block.site.key, weights.reshape(-1)

    parts: dict[str, list[torch.Tensor]] = {key: [] for key in vectors.shapes}
    for key, block in merge_blocks(vectors, prepare(method, vectors), finish, workers=workers):
        parts[key].append(block)
    return {key: torch.cat(parts[key] or [torch.empty(0)]).reshape(shape) for key, shape in vectors.shapes.items()}


def make(name: str, count: int, seed: int = 0, **options: Any) -> TensorMethod | SurveyMethod:
    made = make_method(name, {**QUICK.get(name, {}), **options}, tasks=("ann", "bob", "eve")[:count], seed=seed)
    return cast("TensorMethod | SurveyMethod", made)


def count_for(name: str) -> int:
    most = METHODS[name].experts[1]
    return min(3, most or 3)


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


every_method = pytest.mark.parametrize("name", METHODS)


def test_the_lists_above_cover_the_table() -> None:
    assert FAITHFUL.keys() | UNFAITHFUL.keys() == METHODS.keys()
    assert not FAITHFUL.keys() & UNFAITHFUL.keys()


@pytest.mark.parametrize("name", FAITHFUL)
def test_one_expert_at_scale_one_is_that_expert(name: str) -> None:
    base = state(0, 1.0)
    experts = experts_of(base, 1)
    result = merged(make(name, 1, **FAITHFUL[name]), vectors_of(base, experts))
    for key, tensor in experts["ann"].items():
        torch.testing.assert_close(result[key], tensor, rtol=1e-5, atol=1e-6)


@every_method
def test_zero_deltas_give_the_base(name: str) -> None:
    base = state(0, 1.0)
    count = count_for(name)
    experts = {task: dict(base) for task in ("ann", "bob", "eve")[:count]}
    result = merged(make(name, count), vectors_of(base, experts))
    if name == "slerp":  # goes over the weights themselves, in floating point
        for key, tensor in base.items():
            torch.testing.assert_close(result[key], tensor, rtol=1e-6, atol=1e-6)
    else:
        assert same(result, base)


@every_method
def test_inputs_are_not_changed(name: str) -> None:
    base = state(0, 1.0)
    count = count_for(name)
    vectors = vectors_of(base, experts_of(base, count))
    method = prepare(make(name, count), vectors)
    for block in vectors.blocks(scope=method.scope):
        before = block.base.clone(), block.deltas.clone()
        result = method.merge(block.base, block.deltas, site=block.site)
        assert torch.equal(block.base, before[0])
        assert torch.equal(block.deltas, before[1])
        assert result.shape == block.base.shape


@every_method
@pytest.mark.parametrize("tile", [1, 8, 24, 100])
def test_streamed_equals_whole_to_the_byte(name: str, tile: int) -> None:
    base = state(0, 1.0)
    count = count_for(name)
    experts = experts_of(base, count)
    method = make(name, count)
    assert same(merged(method, vectors_of(base, experts, tile=tile)), merged(method, vectors_of(base, experts)))


@every_method
def test_the_number_of_workers_does_not_matter(name: str) -> None:
    base = state(0, 1.0)
    count = count_for(name)
    experts = experts_of(base, count)
    method = make(name, count)
    one = merged(method, vectors_of(base, experts, tile=16), workers=1)
    assert same(one, merged(method, vectors_of(base, experts, tile=16), workers=4))
    torch.set_num_threads(2)
    assert same(one, merged(method, vectors_of(base, experts, tile=16), workers=2))


@every_method
def test_the_order_of_tensors_does_not_matter(name: str) -> None:
    base = state(0, 1.0)
    count = count_for(name)
    experts = experts_of(base, count)
    method = make(name, count)

    def turned(tensors: State) -> State:
        return dict(reversed(tensors.items()))

    first = merged(method, vectors_of(base, experts))
    second = merged(method, vectors_of(turned(base), {task: turned(expert) for task, expert in experts.items()}))
    assert same(first, {key: second[key] for key in first})


@every_method
def test_the_seed_decides(name: str) -> None:
    base = state(0, 1.0)
    count = count_for(name)
    experts = experts_of(base, count)

    def run(seed: int) -> State:
        return merged(make(name, count, seed), vectors_of(base, experts))

    assert same(run(0), run(0))
    options: dict[str, Any] = {
        option: field.default for option, (_, field) in schema(method_maker(find_method(name))).items()
    }
    if "seed" in options and (options.get("density") or 0.5) < 1:  # at density 1 nothing is drawn
        assert not same(run(0), run(1))


@every_method
def test_results_are_finite_for_identical_experts(name: str) -> None:
    base = state(0, 1.0)
    count = count_for(name)
    expert = experts_of(base, 1)["ann"]
    result = merged(make(name, count), vectors_of(base, dict.fromkeys(("ann", "bob", "eve")[:count], expert)))
    assert all(torch.isfinite(tensor).all() for tensor in result.values())


@every_method
def test_an_unknown_option_is_refused_and_the_nearest_offered(name: str) -> None:
    with pytest.raises(RecipeError, match=r"unknown option 'scael'"):
        make(name, count_for(name), scael=1.0)


@every_method
def test_rows_are_complete(name: str) -> None:
    row = METHODS[name]
    maker = method_maker(row)
    assert row.name == name
    assert row.title
    assert row.reference
    assert maker.__doc__
