"""Weights on a line or a plane: one module in memory that is moved, where every point would else be a merge.

    theta(c) = theta_0 + sum_i c_i d_i

A merge is linear in its `scale`, so those at the origin and at the end of every direction give all the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from orthomerge.core.errors import RecipeError, nearest
from orthomerge.data.task import Split
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.metrics import Score, counted, predict
from orthomerge.merging.merge import merge_opened
from orthomerge.models.encoding import extract
from orthomerge.models.experts import Experts
from orthomerge.models.family import Family
from orthomerge.models.features import Features
from orthomerge.models.heads import Extra, Head, head_of
from orthomerge.models.model import Model
from orthomerge.models.processors import ProcessorSource
from orthomerge.models.skeleton import Skeleton


@dataclass(frozen=True, eq=False)
class Span:
    """`origin` and each of `directions`: floating-point tensors of the module of `skeleton`, by the names of its state
    dict. `processor`: how inputs are processed, unless an `Encoding` says so.
    """

    skeleton: Skeleton
    family: Family
    origin: Mapping[str, torch.Tensor]
    directions: tuple[Mapping[str, torch.Tensor], ...]
    processor: ProcessorSource

    def at(self, *coefficients: float) -> torch.nn.Module:
        """The module with the weights of one point: the same object every time, so use it before the next call."""
        state = self.skeleton.module.state_dict()
        with torch.no_grad():
            for name, start in self.origin.items():
                point = start
                for coefficient, direction in zip(coefficients, self.directions, strict=True):
                    point = torch.add(point, direction[name], alpha=coefficient)
                state[name].copy_(point)
        return self.skeleton.module

    def features(
        self, coefficients: Sequence[float], encoded: EncodedTasks, task: str, split: Split, head: Head | Extra
    ) -> Features:
        """Features of one split at one point, as a head reads them; they are not cached."""
        reader, how = head_of(head), encoded.how
        return extract(
            self.at(*coefficients),
            self.family,
            reader.pooling or self.family.default_pooling,
            encoded.tasks[task][split],
            how.processor or self.processor.processor(reader.max_length),
            task=task,
            how=how,
        )

    def score(
        self, coefficients: Sequence[float], encoded: EncodedTasks, task: str, split: Split, head: Head | Extra
    ) -> Score:
        """The score of a head at one point on one split."""
        truth = encoded.labels(task, split)
        kind, features = head_of(head).kind, self.features(coefficients, encoded, task, split, head)
        return counted(predict(head, features.values, kind), truth, kind)

    def random(self, *, seed: int) -> Span:
        """The same origin, and directions drawn at random in which every tensor is as long as it was."""
        generator = torch.Generator().manual_seed(seed)

        def drawn(tensor: torch.Tensor) -> torch.Tensor:
            noise = torch.randn(tensor.shape, generator=generator)
            return noise.mul_(float(tensor.norm()) / float(noise.norm()))

        directions = ({name: drawn(tensor) for name, tensor in direction.items()} for direction in self.directions)
        return replace(self, directions=tuple(directions))


def arithmetic(experts: Experts, coefficients: Mapping[str, float], *, dtype: str = "float32", seed: int = 0) -> Model:
    """The base plus sum_t coefficient_t tau_t; experts that are not named only give their heads, as they are."""
    check_vectors(experts, coefficients)
    scale = {task: coefficients.get(task, 0.0) for task in experts.tasks}
    return merge_opened(experts, "task_arithmetic", {"scale": scale}, dtype=dtype, seed=seed)


def check_vectors(experts: Experts, tasks: Iterable[str]) -> None:
    """Refuse the task vector of a task that has no expert."""
    for task in tasks:
        if task not in experts.tasks:
            raise RecipeError(
                f"the task vector of {task!r} is wanted, but its expert was not given; {nearest(task, experts.tasks)}"
            )


def span_of(origin: Model, *ends: Model) -> Span:
    """The span of some models of one architecture, which should be in float32: rounded to 16 bits, small directions
    would be noise.
    """
    skeleton = Skeleton.build(origin.family, origin.config, dict(origin.weights.specs))
    start, *others = (_filled(skeleton, model) for model in (origin, *ends))
    directions = ({name: end[name] - tensor for name, tensor in start.items()} for end in others)
    return Span(skeleton, origin.family, start, tuple(directions), origin.processor)


def _filled(skeleton: Skeleton, model: Model) -> dict[str, torch.Tensor]:
    """The floating-point tensors of a model, in the order of the module."""
    skeleton.fill(model.weights)
    names = set(skeleton.names.values())
    state = skeleton.module.state_dict()
    return {name: state[name].clone() for name in state if name in names and state[name].is_floating_point()}


def scales(grid: Sequence[float]) -> tuple[float, ...]:
    """0, which changes nothing and so can always be chosen, and the grid in ascending order."""
    if not grid:
        raise RecipeError("a search over scales needs at least one scale; give a grid")
    for number in grid:
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
            raise RecipeError(f"a grid must hold positive numbers, got {number!r}; 0 is tried in any case")
    return (0.0, *sorted({float(number) for number in grid}))
