"""Weights on a line or a plane: one loaded encoder that is moved, where every point would else be a merge.

    theta(c) = theta_0 + sum_i c_i d_i

A merge is linear in its `scale`, so those at the origin and at the end of every direction give all the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from orthomerge.data.task import Examples, Split
from orthomerge.errors import RecipeError, nearest
from orthomerge.evaluation.bench import Bench
from orthomerge.evaluation.metrics import Score, counted, predict
from orthomerge.heads import Classifier
from orthomerge.merged import Merged, load
from orthomerge.pipeline import merge
from orthomerge.recipe import Recipe

__all__ = ["ORIGIN", "Span", "arithmetic", "labelled", "scales", "score", "span_of"]

ORIGIN = "origin"


@dataclass(frozen=True)
class Span:
    """`origin` and each of `directions` hold the encoder's tensors, on the CPU; `model` is moved among them."""

    model: Merged
    origin: Mapping[str, torch.Tensor]
    directions: tuple[Mapping[str, torch.Tensor], ...]

    def at(self, *coefficients: float) -> Merged:
        """The model with the weights of one point: the same object every time, so use it before the next call."""
        with torch.no_grad():
            for key, tensor in self.model.encoder.state_dict().items():
                point = self.origin.get(key)
                if point is None:
                    continue
                for coefficient, direction in zip(coefficients, self.directions, strict=True):
                    point = torch.add(point, direction[key], alpha=coefficient)
                tensor.copy_(point)
        return self.model

    def random(self, *, seed: int) -> Span:
        """The same origin, and directions drawn at random in which every tensor is as long as it was."""
        generator = torch.Generator().manual_seed(seed)

        def drawn(tensor: torch.Tensor) -> torch.Tensor:
            noise = torch.randn(tensor.shape, generator=generator)
            return noise.mul_(float(tensor.norm()) / float(noise.norm()))

        return replace(self, directions=tuple({key: drawn(t) for key, t in found.items()} for found in self.directions))


def span_of(folder: Path, origin: Recipe, *ends: Recipe) -> Span:
    """The span of some merges, which are made in `folder`; that at the origin, with its heads, as FOLDER/origin.

    In float32 whatever the recipes say: rounded to 16 bits, small directions would be noise. Heads are not aligned.
    """
    outs = [folder / ORIGIN, *(folder / f"end-{number}" for number in range(len(ends)))]
    for recipe, out in zip((origin, *ends), outs, strict=True):
        merge(replace(recipe, dtype="float32", align=None, fit=None), out=out)
    model = load(outs[0])
    start = {key: t.clone() for key, t in model.encoder.state_dict().items() if t.is_floating_point()}
    directions = []
    for out in outs[1:]:
        end = load(out).encoder.state_dict()
        directions.append({key: end[key] - tensor for key, tensor in start.items()})
    return Span(model, start, tuple(directions))


def arithmetic(recipe: Recipe, coefficients: Mapping[str, float]) -> Recipe:
    """The recipe of base + sum_t coefficient_t tau_t; experts that are not named only give their heads, as they are."""
    for task in coefficients:
        if task not in recipe.experts:
            raise RecipeError(
                f"the task vector of {task!r} is wanted, but its expert was not given; {nearest(task, recipe.experts)}"
            )
    scale = {task: coefficients.get(task, 0.0) for task in recipe.experts}
    return replace(recipe, method="task_arithmetic", parameters={"scale": scale}, vector=None, align=None, fit=None)


def scales(grid: Sequence[float]) -> tuple[float, ...]:
    """0, which changes nothing and so can always be chosen, and the grid in ascending order."""
    if not grid:
        raise RecipeError("a search over scales needs at least one scale; give a grid")
    for number in grid:
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
            raise RecipeError(f"a grid must hold positive numbers, got {number!r}; 0 is tried in any case")
    return (0.0, *sorted({float(number) for number in grid}))


def labelled(bench: Bench, task: str, split: Split) -> tuple[Examples, torch.Tensor]:
    """One split of a task, and its labels [n], without which it is an error."""
    if task not in bench.tasks:
        raise RecipeError(f"there is no data of {task!r}; {nearest(task, bench.tasks)}")
    examples = bench.tasks[task][split]
    if examples.labels is None:
        raise RecipeError(f"the {split} split of {task!r} has no labels; accuracy needs them: give labelled data")
    return examples, torch.tensor(examples.labels, dtype=torch.int64)


def score(bench: Bench, model: Merged, head: Classifier, task: str, split: Split) -> Score:
    """The accuracy of a model under a head on one split."""
    examples, truth = labelled(bench, task, split)
    return counted(predict(head, bench.encode(model, task, examples).values), truth)
