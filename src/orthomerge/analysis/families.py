"""How near each family of maps brings merged features to the expert's, and what the expert's head then makes of them.

MOMA, arXiv 2412.13526 v3, Table 1 and Figure 4. Differs from the paper, which shows the training loss: maps are fitted
on other inputs than they are measured on, so a family that only fits noise does not look good.

Letters: H, T [n, d] what the head reads of merged encoder and expert; G a map; z, z_T [n, C] logits. Distance is
mean |G(h) - t| / mean |t - mean t|: 1 is as far off as always guessing the mean. KL is mean KL(softmax z_T, softmax z).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from orthomerge.alignment.folding import logits_from
from orthomerge.analysis.checking import matched
from orthomerge.analysis.figures import Bars, Heat, Series
from orthomerge.analysis.maps import Map
from orthomerge.core.errors import IncompatibleError, RecipeError
from orthomerge.evaluation.metrics import hits, predictions, wilson
from orthomerge.models.heads import SINGLE_LABEL, Head
from orthomerge.models.kinds import head_kind

Hits = NDArray[np.bool_]


@dataclass(frozen=True)
class Reading:
    """One way of reading a task's test inputs. `distance` is NaN where there is a head and no map of features."""

    distance: float
    kl: float
    hits: Hits

    @property
    def accuracy(self) -> float:
        return float(self.hits.mean())


def relative_distance(mapped: torch.Tensor, T: torch.Tensor) -> float:
    """See the module; NaN where the expert's features are all the same."""
    mapped, T = matched(mapped, T, what="mapped and expert features")
    spread = float((T - T.mean(0)).norm(dim=1).mean())
    return float((mapped - T).norm(dim=1).mean()) / spread if spread > 0 else math.nan


def divergence(z: torch.Tensor, z_T: torch.Tensor, *, kind: str = SINGLE_LABEL) -> float:
    """Mean divergence from the expert's outputs to ours; of a softmax KL, in nats."""
    z, z_T = matched(z, z_T, what="our logits and the expert's")
    return max(0.0, float(head_kind(kind).divergence(z, z_T).mean()))


def read_mapped(G: Map, H: torch.Tensor, T: torch.Tensor, *, head: Head, truth: torch.Tensor) -> Reading:
    """Mapped features under the expert's head."""
    mapped = G(H)
    reading = read_logits(logits_from(head, mapped), logits_from(head, T), truth=truth, kind=head.kind)
    return Reading(relative_distance(mapped, T), reading.kl, reading.hits)


def read_logits(z: torch.Tensor, z_T: torch.Tensor, *, truth: torch.Tensor, kind: str = SINGLE_LABEL) -> Reading:
    """What a classifier says, beside what the expert says. `kind`: of both heads."""
    return Reading(math.nan, divergence(z, z_T, kind=kind), hits(predictions(z, kind), truth).numpy())


def family_figures(
    found: Mapping[str, Mapping[str, Reading]], experts: Mapping[str, Hits], *, fitted: str
) -> tuple[Bars | Heat, ...]:
    """From readings by family and task: accuracy, distance and KL in the mean of tasks, and accuracy by task.

    `fitted`: what maps and heads were fitted on, in words.
    """
    if not found:
        raise RecipeError("no family of maps was read; give at least one")
    tasks = tuple(experts)
    for family, by_task in found.items():
        if tuple(by_task) != tasks:
            raise IncompatibleError(f"{family!r} was not read on the tasks of the experts, in their order")
    held_out = f"Fitted on {fitted}, measured on test inputs."
    rows = {family: [reading.hits for reading in by_task.values()] for family, by_task in found.items()}
    rows["expert"] = list(experts.values())
    means = [mean_interval(parts) for parts in rows.values()]
    middle, low, high = (tuple(column) for column in zip(*means, strict=True))
    mapped = {family: _mean([reading.distance for reading in by.values()]) for family, by in found.items()}
    mapped = {family: value for family, value in mapped.items() if not math.isnan(value)}
    kls = {family: _mean([reading.kl for reading in by.values()]) for family, by in found.items()}
    return (
        Bars(
            "families-accuracy",
            "Accuracy under each family of maps",
            f"Merged features are mapped, then read by the expert's head; mean of tasks, 95 % interval. {held_out}",
            tuple(rows),
            "accuracy, %",
            (Series("mean of tasks", middle, low, high),),
        ),
        _bars(
            "families-distance",
            "Distance to the expert's features",
            f"Mean distance, as a share of how far the expert's features lie from their mean. {held_out}",
            "relative distance",
            mapped,
        ),
        _bars(
            "families-kl",
            "Divergence from the expert's outputs",
            f"Mean KL from the expert's class probabilities; lower is nearer. {held_out}",
            "KL, nats",
            kls,
        ),
        Heat(
            "families-by-task",
            "Accuracy under each family, by task",
            f"As above, task by task. {held_out}",
            tuple(rows),
            tasks,
            tuple(tuple(round(100 * float(part.mean()), 2) for part in parts) for parts in rows.values()),
            "accuracy, %",
        ),
    )


def _bars(key: str, title: str, caption: str, unit: str, values: Mapping[str, float]) -> Bars:
    return Bars(key, title, caption, tuple(values), unit, (Series("mean of tasks", tuple(values.values())),))


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def mean_interval(parts: Sequence[Hits]) -> tuple[float, float, float]:
    """Percent, with the tasks' Wilson intervals put together as in the tables."""
    ends = [(float(part.mean()), *wilson(int(part.sum()), len(part))) for part in parts]
    middle = _mean([value for value, _, _ in ends])
    low = math.hypot(*(value - low for value, low, _ in ends)) / len(ends)
    high = math.hypot(*(high - value for value, _, high in ends)) / len(ends)
    return 100 * middle, 100 * max(0.0, middle - low), 100 * min(1.0, middle + high)
