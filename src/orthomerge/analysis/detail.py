"""Options of a diagnosis, and samples of inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orthomerge.alignment.aligners import find_aligner
from orthomerge.core.checks import at_least_one, not_negative
from orthomerge.core.errors import RecipeError
from orthomerge.data.task import Examples, Labels, Split, Task, share, stratified


@dataclass(frozen=True)
class Detail:
    """Most inputs per task: `points` for t-SNE, `layers` for CKA, `maps` for fits of maps, `limit` for all fits.

    With 0 points or layers these figures are left out. `probe`: also fit a classifier with labels to merged features.
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
    """Choose indices of at most `most` of `count` inputs, stratified by class if labels are given."""
    if count <= most:
        return np.arange(count, dtype=np.int64)
    if labels is None or len(np.unique(labels)) < 2:
        return share(count, most / count, seed=seed)
    return stratified(labels, most, seed=seed)


def sample(examples: Examples, *, most: int, seed: int) -> Examples:
    return examples.take(chosen_inputs(examples.labels, len(examples), most=most, seed=seed))


def fitting_split(task: Task) -> Split:
    """Return the split that maps and heads are fitted to, train or val; they are measured on test."""
    if len(task.splits.get("train", ())):
        return "train"
    if len(task.splits.get("val", ())):
        return "val"
    raise RecipeError(
        f"{task.name!r} must have a train or val split, to which a diagnosis fits maps, got a test split alone; "
        "give one of them (no labels are needed)"
    )
