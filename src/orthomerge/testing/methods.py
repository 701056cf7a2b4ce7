"""Contracts of data-free merging methods.

Experts are random changes of a random base that has tensors of all kinds: matrices, an embedding, vectors, a
convolution, a scalar, and one without elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from orthomerge.core.schema import maker_of, schema
from orthomerge.merging.kinds import Block
from orthomerge.merging.methods import Row, build_method
from orthomerge.merging.stream import merge_blocks, prepare
from orthomerge.merging.vectors import TILE, TaskVector, TaskVectors
from orthomerge.testing.rows import check_row, same

State = dict[str, torch.Tensor]

_TASKS = ("ann", "bob", "eve")
_SHAPES = {
    "embeddings.word.weight": (23, 8),
    "layer.0.weight": (12, 8),
    "layer.0.bias": (12,),
    "layer.1.weight": (8, 12),
    "patch.weight": (4, 3, 2, 2),
    "scale": (),
    "empty": (0, 4),
}
_TILES = (1, 8, 24, 100)


def check_method(row: Row, options: Mapping[str, Any] | None = None) -> None:
    """Check the contracts of a data-free method; raise an AssertionError for the first that is broken.

    `options` are added to those of `row.quick`; the contract of a single expert uses those of `row.faithful` alone.
    """
    case = _Case(row, {**row.quick, **(options or {})})
    for contract in CONTRACTS:
        contract(case)


@dataclass(frozen=True)
class _Case:
    """A row with options."""

    row: Row
    options: Mapping[str, Any]

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks of as many experts as the method merges, at most three."""
        return _TASKS[: self.row.experts[1]]

    def require(self, condition: object, message: str) -> None:
        if not condition:
            raise AssertionError(f"method {self.row.name!r} with options {dict(self.options)}: {message}")

    def method(self, tasks: tuple[str, ...], seed: int = 0, **options: Any) -> Any:
        return build_method(self.row, {**self.options, **options}, tasks=tasks, seed=seed)

    def merged(
        self, base: State, experts: Mapping[str, State], *, seed: int = 0, tile: int = TILE, workers: int = 1
    ) -> State:
        """Merge all blocks and join them to tensors."""
        vectors = _vectors(base, experts, tile)
        method = prepare(self.method(tuple(experts), seed), vectors)
        parts: dict[str, list[torch.Tensor]] = {key: [torch.empty(0)] for key in vectors.shapes}
        with closing(merge_blocks(vectors, method, self._checked, workers=workers)) as blocks:
            for key, block in blocks:
                parts[key].append(block)
        return {key: torch.cat(parts[key]).reshape(shape) for key, shape in vectors.shapes.items()}

    def _checked(self, block: Block, weights: torch.Tensor) -> tuple[str, torch.Tensor]:
        self.require_like(weights, block)
        return block.site.key, weights.reshape(-1)

    def require_like(self, result: torch.Tensor, block: Block) -> None:
        """Require a result in float32 with the shape of the base."""
        where, shape = f"the result of {block.site.key!r} must", tuple(block.base.shape)
        self.require(result.dtype == torch.float32, f"{where} be float32, got {result.dtype}")
        self.require(result.shape == shape, f"{where} have shape {shape}, got {tuple(result.shape)}")


def _row_is_complete(case: _Case) -> None:
    check_row(case.row, case.require, what="method")
    case.require(not case.row.fitted, "only methods without inputs are checked here; use check_fitted_method")
    case.require(
        case.row.faithful is not None,
        "'faithful' must be options under which a single expert comes back unchanged, or say why there are none",
    )


def _single_expert_comes_back(case: _Case) -> None:
    if not isinstance(case.row.faithful, Mapping):
        return
    base, experts = _world(1)
    faithful = _Case(case.row, case.row.faithful)
    result = faithful.merged(base, experts)
    for key, tensor in experts[_TASKS[0]].items():
        faithful.require(
            torch.allclose(result[key], tensor, rtol=1e-5, atol=1e-6),
            f"a single expert must come back unchanged, {key!r} does not",
        )


def _zero_deltas_give_the_base(case: _Case) -> None:
    base, _ = _world(1)
    result = case.merged(base, dict.fromkeys(case.tasks, base))
    case.require(same(result, base), "experts that are the base must give the base, bit for bit")


def _inputs_are_not_changed(case: _Case) -> None:
    vectors = _vectors(*_world(len(case.tasks)))
    method = prepare(case.method(case.tasks), vectors)
    for block in vectors.blocks(scope=method.scope):
        base, deltas = block.base.clone(), block.deltas.clone()
        case.require_like(method.merge(block.base, block.deltas, site=block.site), block)
        unchanged = torch.equal(block.base, base) and torch.equal(block.deltas, deltas)
        case.require(unchanged, f"the method must not write into its inputs, as it does for {block.site.key!r}")


def _neither_blocks_nor_threads_matter(case: _Case) -> None:
    base, experts = _world(len(case.tasks))
    whole = case.merged(base, experts)
    for tile in _TILES:
        case.require(
            same(whole, case.merged(base, experts, tile=tile)),
            f"blocks of {tile} elements must give the same bits as whole tensors",
        )
    before = torch.get_num_threads()
    for workers, threads in ((4, before), (2, 2)):
        torch.set_num_threads(threads)
        try:
            result = case.merged(base, experts, tile=16, workers=workers)
        finally:
            torch.set_num_threads(before)
        case.require(same(whole, result), f"{workers} workers must give the same bits as one")


def _order_of_tensors_does_not_matter(case: _Case) -> None:
    base, experts = _world(len(case.tasks))
    result = case.merged(_reversed(base), {task: _reversed(expert) for task, expert in experts.items()})
    case.require(same(case.merged(base, experts), result), "tensors in another order must give the same bits")


def _seed_decides(case: _Case) -> None:
    """Check that the same seed gives the same bits and another seed others, except at density 1."""
    base, experts = _world(len(case.tasks))
    first = case.merged(base, experts)
    case.require(same(first, case.merged(base, experts)), "two merges with the same seed must give the same bits")
    defaults = {name: option.default for name, (_, option) in schema(maker_of(case.row)).items()}
    options = {**defaults, **case.options}
    if "seed" in options and (options.get("density") or 0.5) < 1:
        case.require(not same(first, case.merged(base, experts, seed=1)), "another seed must change the result")


def _identical_experts_are_finite(case: _Case) -> None:
    base, experts = _world(1)
    result = case.merged(base, dict.fromkeys(case.tasks, experts[_TASKS[0]]))
    finite = all(torch.isfinite(tensor).all() for tensor in result.values())
    case.require(finite, "identical experts must give finite weights")


CONTRACTS: tuple[Callable[[_Case], None], ...] = (
    _row_is_complete,
    _single_expert_comes_back,
    _zero_deltas_give_the_base,
    _inputs_are_not_changed,
    _neither_blocks_nor_threads_matter,
    _order_of_tensors_does_not_matter,
    _seed_decides,
    _identical_experts_are_finite,
)


def _world(count: int) -> tuple[State, dict[str, State]]:
    base, *changes = (_state(seed, 1.0 if seed == 0 else 0.1) for seed in range(count + 1))
    experts = {
        task: {key: base[key] + delta for key, delta in change.items()}
        for task, change in zip(_TASKS, changes, strict=False)
    }
    return base, experts


def _state(seed: int, scale: float) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {key: scale * torch.randn(shape, generator=generator) for key, shape in _SHAPES.items()}


def _vectors(base: State, experts: Mapping[str, State], tile: int = TILE) -> TaskVectors:
    return TaskVectors({task: TaskVector.between(base, expert) for task, expert in experts.items()}, tile)


def _reversed(state: State) -> State:
    return dict(reversed(state.items()))
