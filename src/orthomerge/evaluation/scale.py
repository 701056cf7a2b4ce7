"""Weights on a line or a plane: one module in memory that is moved, where every point would else be a merge.

    theta(c) = theta_0 + sum_i c_i d_i

A merge is linear in its `scale`, so those at the origin and at the end of every direction give all the others. Lambda
is chosen among the points of a grid on validation inputs: with labels by mean normalised accuracy (Ortiz-Jimenez et
al. 2023), without by the mean agreement with the experts' own predictions. Test inputs play no part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from orthomerge.core.errors import RecipeError, nearest
from orthomerge.core.progress import SILENT, Progress
from orthomerge.core.rows import maker_of
from orthomerge.core.schema import schema
from orthomerge.data.reading import labelled_tasks
from orthomerge.data.task import Split
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.metrics import Score, counted, predict
from orthomerge.merging.merge import merge_opened
from orthomerge.merging.methods import find_method
from orthomerge.models.encoding import Encoding, extract
from orthomerge.models.experts import Experts
from orthomerge.models.family import Family
from orthomerge.models.features import Features
from orthomerge.models.heads import Extra, Head, head_kind, head_of
from orthomerge.models.model import Model
from orthomerge.models.processors import ProcessorSource
from orthomerge.models.skeleton import Skeleton

Criterion = Literal["accuracy", "agreement"]
GRID = tuple(round(0.05 * step, 2) for step in range(1, 21))


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


@dataclass(frozen=True)
class ScaleSearch:
    """The curve: each scale with its score in percent, by task and in the mean; `best` has the highest mean."""

    criterion: Criterion
    curve: dict[float, dict[str, float]]

    @property
    def means(self) -> dict[float, float]:
        return {scale: sum(scores.values()) / len(scores) for scale, scores in self.curve.items()}

    @property
    def best(self) -> float:
        return max(self.means, key=lambda scale: (self.means[scale], -scale))

    def plot(self, width: int = 40) -> str:
        """The curve as text."""
        top = max(self.means.values())
        rows = []
        for scale, value in self.means.items():
            bar = "#" * max(0, round(width * value / max(top, 1e-9)))
            rows.append(f"{scale:5.2f} {value:5.1f} {bar}{' <' if scale == self.best else ''}")
        return "\n".join(rows)


def search_scale(
    experts: Experts,
    method: str,
    data: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    *,
    grid: Sequence[float] = GRID,
    criterion: Criterion | Literal["auto"] = "auto",
    seed: int = 0,
    device: str = "cpu",
    vector: str | None = None,
    encoding: Encoding | None = None,
    progress: Progress = SILENT,
) -> ScaleSearch:
    """Score the merges at every scale of a grid on the validation inputs of `data`; `.best` is the scale to take.

    `criterion`: accuracy, normalised by the experts', or agreement with the experts, which needs no labels; "auto" is
    accuracy if all validation inputs have labels. Test inputs are not looked at. Every method with a `scale` multiplies
    its merged vector by it, so all merges lie on the line through those at 0 and 1.
    """
    if not grid:
        raise RecipeError("a search over scales needs at least one scale; give a grid")
    if "scale" not in schema(maker_of(find_method(method))):
        raise RecipeError(f"{method!r} has no 'scale' to search; merge it as it is")
    labels = {task: head.labels for task, head in experts.heads.items()}
    tasks = labelled_tasks(data, labels, experts.family.modality)
    if criterion == "auto":
        labelled = all(task["val"].labels is not None for task in tasks.values())
        criterion = "accuracy" if labelled else "agreement"
    how: dict[str, Any] = {"dtype": "float32", "seed": seed, "device": device, "vector": vector}
    ends = [merge_opened(experts, method, {**(options or {}), "scale": scale}, **how) for scale in (0.0, 1.0)]
    teachers = {task: experts.teacher(task) for task in tasks}
    span, encoded = span_of(*ends), EncodedTasks(tasks, teachers, encoding or Encoding())
    curve: dict[float, dict[str, float]] = {}
    for scale in map(float, grid):
        curve[scale] = {task: _score(span, scale, experts.heads[task], encoded, task, criterion) for task in tasks}
        progress.stage(f"scale {scale:g}: {sum(curve[scale].values()) / len(tasks):.1f}", None)
    return ScaleSearch(criterion, curve)


def _score(
    span: Span, scale: float, head: Head | Extra, encoded: EncodedTasks, task: str, criterion: Criterion
) -> float:
    """Accuracy normalised by the expert's, or agreement with the expert, on the val split; in percent."""
    kind, features = head_of(head).kind, span.features((scale,), encoded, task, "val", head)
    predicted = predict(head, features.values, kind)
    expert = encoded.predictions(encoded.teacher(task), task, "val")
    if criterion == "agreement":
        return 100 * float((predicted == expert).float().mean())
    if features.labels is None:
        raise RecipeError(f"the val split of {task!r} has no labels; choose the scale by 'agreement' instead")
    right, own = (head_kind(kind).right(chosen, features.labels).float().mean() for chosen in (predicted, expert))
    return 100 * float(right) / max(float(own), 1e-9)
