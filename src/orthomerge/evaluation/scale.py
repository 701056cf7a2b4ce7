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
from orthomerge.evaluation.metrics import Score
from orthomerge.merging.merge import merge_opened
from orthomerge.merging.methods import find_method
from orthomerge.models.encoding import Encoding
from orthomerge.models.experts import Experts
from orthomerge.models.heads import Extra, Head
from orthomerge.models.model import Model
from orthomerge.models.model_data import loaded
from orthomerge.models.tensors import MemoryTensors

Criterion = Literal["accuracy", "agreement"]
GRID = tuple(round(0.05 * step, 2) for step in range(1, 21))


@dataclass(frozen=True, eq=False)
class Span:
    """A model theta_0 (`origin`), its tensors by name (`start`), and d_i (`directions`): changes of these tensors."""

    origin: Model
    start: Mapping[str, torch.Tensor]
    directions: tuple[Mapping[str, torch.Tensor], ...]

    def at(self, *coefficients: float) -> Model:
        """Return the model at one point."""
        tensors = dict(self.start)
        for coefficient, direction in zip(coefficients, self.directions, strict=True):
            for name, change in direction.items():
                tensors[name] = torch.add(tensors[name], change, alpha=coefficient)
        encoder = replace(self.origin.encoder, tensors=MemoryTensors(tensors), content=None)
        return replace(self.origin, encoder=encoder)

    def scores(
        self, coefficients: Sequence[float], encoded: EncodedTasks, split: Split, heads: Mapping[str, Head | Extra]
    ) -> dict[str, Score]:
        """Score one head per task at one point on one split; features are not cached."""
        model, encoded = self.at(*coefficients).with_heads(heads), uncached(encoded)
        return {task: encoded.score(model, task, split) for task in heads}

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
    states = []
    for model in (origin, *ends):
        skeleton = loaded(model.encoder)
        keys, state = {name: key for key, name in skeleton.names.items()}, skeleton.module.state_dict()
        states.append({keys[name]: tensor.clone() for name, tensor in state.items() if name in keys})
    start, *others = states
    directions = (
        {key: end[key] - tensor for key, tensor in start.items() if tensor.is_floating_point()} for end in others
    )
    return Span(origin, start, tuple(directions))


def uncached(encoded: EncodedTasks) -> EncodedTasks:
    """Return the same tasks for models that are used once: their features are not kept on disk."""
    return replace(encoded, how=replace(encoded.how, cache=None))


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
        model = span.at(scale).with_heads(experts.heads)
        curve[scale] = _criterion_values(model, encoded, criterion)
        progress.stage(f"scale {scale:g}: {sum(curve[scale].values()) / len(tasks):.1f}", None)
    return ScaleSearch(criterion, curve)


def scale_curve(experts: Experts, data: Mapping[str, Any], **how: Any) -> ScaleSearch:
    """Score task arithmetic on labelled validation inputs at scales from 0.1 to 1; `how`: as in `search_scale`."""
    grid = [step / 10 for step in range(1, 11)]
    return search_scale(experts, "task_arithmetic", data, grid=grid, criterion="accuracy", **how)


def _criterion_values(model: Model, encoded: EncodedTasks, criterion: Criterion) -> dict[str, float]:
    """Return accuracies normalised by the experts', or agreement with the experts, on the val splits; in percent."""
    fresh, values = uncached(encoded), {}
    for task, expert in encoded.teachers.items():
        if criterion == "accuracy":
            best = encoded.score(expert, task, "val").value
            values[task] = 100 * fresh.score(model, task, "val").value / max(best, 1e-9)
        else:
            same = fresh.predictions(model, task, "val") == encoded.predictions(expert, task, "val")
            values[task] = 100 * float(same.float().mean())
    return values
