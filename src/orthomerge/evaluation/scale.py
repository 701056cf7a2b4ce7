"""Search over the scale of a merge, with one module in memory instead of a merge per scale.

    theta(c) = theta_0 + sum_i c_i d_i

A merge is linear in its `scale`, so the merges at 0 and 1 give all others. Lambda is chosen on validation inputs: with
labels by mean normalised accuracy (Ortiz-Jimenez et al. 2023), without by mean agreement with the experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from orthomerge.core.errors import RecipeError, nearest
from orthomerge.core.progress import SILENT, Progress
from orthomerge.core.schema import maker_of, schema
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
from orthomerge.models.heads import Extra, Head, head_of
from orthomerge.models.model import Model
from orthomerge.models.processors import ProcessorSource
from orthomerge.models.skeleton import Skeleton

Criterion = Literal["accuracy", "agreement"]
GRID = tuple(round(0.05 * step, 2) for step in range(1, 21))


@dataclass(frozen=True, eq=False)
class Span:
    """Weights theta_0 (`origin`) and d_i (`directions`): floating-point tensors by the names of a state dict."""

    skeleton: Skeleton
    family: Family
    origin: Mapping[str, torch.Tensor]
    directions: tuple[Mapping[str, torch.Tensor], ...]
    processor: ProcessorSource

    def at(self, *coefficients: float) -> torch.nn.Module:
        """Load the weights of one point; every call returns the same module."""
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
        """Encode one split at one point, with the pooling and length of a head; not cached."""
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
        truth, kind = encoded.labels(task, split), head_of(head).kind
        features = self.features(coefficients, encoded, task, split, head)
        return counted(predict(head, features.values, kind), truth, kind)

    def random(self, *, seed: int) -> Span:
        """Return a span with random directions whose tensors have the same norms."""
        generator = torch.Generator().manual_seed(seed)

        def noise_like(tensor: torch.Tensor) -> torch.Tensor:
            noise = torch.randn(tensor.shape, generator=generator)
            return noise.mul_(float(tensor.norm()) / float(noise.norm()))

        directions = ({name: noise_like(tensor) for name, tensor in direction.items()} for direction in self.directions)
        return replace(self, directions=tuple(directions))


def arithmetic(experts: Experts, coefficients: Mapping[str, float], *, dtype: str = "float32", seed: int = 0) -> Model:
    """Merge to theta_b + sum_t coefficient_t tau_t; missing coefficients are 0."""
    check_vectors(experts, coefficients)
    scale = {task: coefficients.get(task, 0.0) for task in experts.tasks}
    return merge_opened(experts, "task_arithmetic", {"scale": scale}, dtype=dtype, seed=seed)


def check_vectors(experts: Experts, tasks: Iterable[str]) -> None:
    for task in tasks:
        if task not in experts.tasks:
            raise RecipeError(
                f"the task vector of {task!r} needs its expert, which was not given; {nearest(task, experts.tasks)}"
            )


def span_of(origin: Model, *ends: Model) -> Span:
    """Return the span of models of one architecture, in float32: in 16 bits small directions would be noise."""
    skeleton = Skeleton.build(origin.family, origin.config, dict(origin.weights.specs))
    names, states = set(skeleton.names.values()), []
    for model in (origin, *ends):
        skeleton.fill(model.weights)
        state = skeleton.module.state_dict()
        states.append(
            {name: state[name].clone() for name in state if name in names and state[name].is_floating_point()}
        )
    start, *others = states
    directions = ({name: end[name] - tensor for name, tensor in start.items()} for end in others)
    return Span(skeleton, origin.family, start, tuple(directions), origin.processor)


def scales(grid: Sequence[float]) -> tuple[float, ...]:
    """Check a grid, sort it and add scale 0, the base."""
    if not grid:
        raise RecipeError("a search over scales needs at least one scale; give a grid")
    for number in grid:
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
            raise RecipeError(f"a grid must hold positive numbers, got {number!r}; leave 0 out: it is always tried")
    return (0.0, *sorted({float(number) for number in grid}))


@dataclass(frozen=True)
class ScaleSearch:
    """Scores in percent by scale and task; `best` has the highest mean, ties go to the smallest scale."""

    criterion: Criterion
    curve: dict[float, dict[str, float]]

    @property
    def means(self) -> dict[float, float]:
        return {scale: sum(scores.values()) / len(scores) for scale, scores in self.curve.items()}

    @property
    def best(self) -> float:
        return max(self.means, key=lambda scale: (self.means[scale], -scale))

    def plot(self, width: int = 40) -> str:
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
    """Score the merge at every scale of a grid on the validation inputs of `data`.

    `criterion`: accuracy, normalised by the experts', or agreement with the experts, which needs no labels; "auto" is
    accuracy if all validation inputs have labels.
    """
    if "scale" not in schema(maker_of(find_method(method))):
        raise RecipeError(f"{method!r} has no 'scale' to search; merge without a search")
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
    for scale in scales(grid)[1:]:
        curve[scale] = {task: _criterion_value(span, scale, experts, encoded, task, criterion) for task in tasks}
        progress.stage(f"scale {scale:g}: {sum(curve[scale].values()) / len(tasks):.1f}", None)
    return ScaleSearch(criterion, curve)


def scale_curve(experts: Experts, data: Mapping[str, Any], **how: Any) -> ScaleSearch:
    """Score task arithmetic on labelled validation inputs at scales from 0.1 to 1; `how`: as in `search_scale`."""
    grid = [step / 10 for step in range(1, 11)]
    return search_scale(experts, "task_arithmetic", data, grid=grid, criterion="accuracy", **how)


def _criterion_value(
    span: Span, scale: float, experts: Experts, encoded: EncodedTasks, task: str, criterion: Criterion
) -> float:
    """Return accuracy normalised by the expert's, or agreement with the expert, on the val split; in percent."""
    head, expert = experts.heads[task], encoded.teacher(task)
    if criterion == "accuracy":
        best = encoded.score(expert, task, "val").value
        return 100 * span.score((scale,), encoded, task, "val", head).value / max(best, 1e-9)
    predicted = predict(head, span.features((scale,), encoded, task, "val", head).values, head_of(head).kind)
    return 100 * float((predicted == encoded.predictions(expert, task, "val")).float().mean())
