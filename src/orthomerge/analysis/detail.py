"""Options of a diagnosis, and samples of inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from orthomerge.alignment.aligners import find_aligner
from orthomerge.core.checks import at_least_one, not_negative
from orthomerge.core.errors import RecipeError
from orthomerge.data.task import Examples, Labels, Split, Task, share, stratified


@dataclass(frozen=True)
class Detail:
    """Inputs per task: `points` for t-SNE, `layers` for CKA, `maps` that maps are fitted to, `limit` for any fit.

    0 points or layers leave these figures out. `probe`: also fit a classifier to the merged features with labels.
    """

    aligner: str = "auto"
    points: int = 400
    layers: int = 512
    maps: int = 4096
    probe: bool = True
    limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        find_aligner(self.aligner)
        not_negative(points=self.points, layers=self.layers, seed=self.seed)
        at_least_one(maps=self.maps, limit=self.limit)


def chosen_inputs(labels: Labels | None, count: int, *, most: int, seed: int) -> Labels:
    """Choose places of at most `most` of `count` inputs; if labels are known, classes keep their shares."""
    if count <= most:
        return np.arange(count, dtype=np.int64)
    if labels is None or len(np.unique(labels)) < 2:
        return share(count, most / count, seed=seed)
    return stratified(labels, most, seed=seed)


def sample(examples: Examples, *, most: int, seed: int) -> Examples:
    """Choose at most `most` examples."""
    return examples.take(chosen_inputs(examples.labels, len(examples), most=most, seed=seed))


def fitting_split(task: Task) -> Split:
    """Split that maps and heads are fitted to; it must be another than the one they are measured on."""
    if len(task.splits.get("train", ())):
        return "train"
    if len(task.splits.get("val", ())):
        return "val"
    raise RecipeError(
        f"a diagnosis fits maps to inputs that it does not measure them on, and {task.name!r} has a test split alone; "
        "give a train or val split too (no labels are needed)"
    )


def limited(task: Task, *, most: int | None, seed: int) -> Task:
    """Limit the inputs that maps and heads are fitted to."""
    if most is None:
        return task
    split = fitting_split(task)
    return replace(task, splits={**task.splits, split: sample(task[split], most=most, seed=seed)})
