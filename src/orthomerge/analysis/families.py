"""How close each family of maps brings merged features to the expert's, and what the expert's head then predicts.

MOMA, arXiv 2412.13526 v3, Eq. 7, Table 1 and Figure 4. The best map of a family is found by the aligner of that name.
An aligner folds its map into the first linear map of a head: where that is the identity, the result is the map itself,
and its strength was chosen by the distance of held-out features.

Differs from the paper: squared distances, a prior at the identity, closed forms; see `alignment`. As in its Table 1
the affine map alone has a shift; `rigid`, the orthogonal map with one, is ours. The paper shows the training loss; here
maps are measured on other inputs than they are fitted to, so a family that only fits noise does not look good.

Letters: H, T [n, d] what the head reads of merged encoder and expert; G(h) = A h + c a map; z, z_T [n, C] logits.
Distance is mean |G(h) - t| / mean |t - mean t|: 1 is as far as always guessing the mean. KL is
mean KL(softmax z_T, softmax z).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from orthomerge.alignment.aligners import make_aligner
from orthomerge.alignment.folding import first_map, logits_from
from orthomerge.alignment.problem import Problem
from orthomerge.analysis.figures import Bars, Heat, Series
from orthomerge.analysis.recovery import Hits
from orthomerge.evaluation.metrics import Score, hits, mean_interval, wilson
from orthomerge.models.features import FeaturePair, Features
from orthomerge.models.heads import Head, Linear, head_kind

FAMILIES = ("none", "scaling", "orthogonal", "similarity", "rigid", "invertible", "linear", "affine")
_ALIGNERS = {"rigid": "orthogonal"}
_SHIFTED = ("rigid", "affine")

Map = Callable[[torch.Tensor], torch.Tensor]  # G of every row [n, d], in float64


@dataclass(frozen=True)
class Reading:
    """One way of classifying a task's test inputs. `distance`: NaN of a head that involves no map of features."""

    distance: float
    kl: float
    hits: Hits


def fit_maps(H: torch.Tensor, T: torch.Tensor, *, task: str) -> dict[str, Map]:
    """The best map of every family, fitted to all rows; one row alone leaves everything as it is."""
    problems = {biased: _problem(H, T, task, biased=biased) for biased in (False, True)}
    maps: dict[str, Map] = {"none": torch.Tensor.double}
    for family in FAMILIES[1:]:
        aligner: Any = make_aligner(_ALIGNERS.get(family, family))
        maps[family] = first_map(aligner.align(problems[family in _SHIFTED]).classifier)
    return maps


def _problem(H: torch.Tensor, T: torch.Tensor, task: str, *, biased: bool) -> Problem:
    """The alignment problem of a head whose first map is the identity."""
    pair = FeaturePair(Features(H.double(), task, "train"), Features(T.double(), task, "train"))
    d = H.shape[1]
    identity = Linear(torch.eye(d, dtype=torch.float64), torch.zeros(d, dtype=torch.float64) if biased else None)
    blank = Linear(torch.zeros(1, d, dtype=torch.float64))
    return Problem.of(pair, Head(blank, ("",), identity, "tanh"))


def read_mapped(G: Map, H: torch.Tensor, T: torch.Tensor, *, head: Head, truth: torch.Tensor) -> Reading:
    """Classify mapped features with the expert's head."""
    mapped = G(H)
    reading = read_logits(logits_from(head, mapped), logits_from(head, T), head=head, truth=truth)
    return Reading(relative_distance(mapped, T), reading.kl, reading.hits)


def read_logits(z: torch.Tensor, z_T: torch.Tensor, *, head: Head, truth: torch.Tensor) -> Reading:
    """The outputs of a classifier compared with those of the expert's head and with the labels."""
    kind = head_kind(head.kind)
    kl = max(0.0, float(kind.divergence(z.double(), z_T.double()).mean()))
    return Reading(math.nan, kl, hits(kind.choices(z), truth, head.kind).numpy())


def relative_distance(mapped: torch.Tensor, T: torch.Tensor) -> float:
    """See the module; NaN if the expert's features are all the same."""
    spread = float((T - T.mean(0)).norm(dim=1).mean())
    return float((mapped - T).norm(dim=1).mean()) / spread if spread > 0 else math.nan


def family_figures(
    readings: Mapping[str, Mapping[str, Reading]], experts: Mapping[str, Hits], *, fitted: str
) -> tuple[Bars | Heat, ...]:
    """Accuracy, distance and KL in the mean of tasks, and accuracy by task, from readings by family and task.

    `experts`: hits by task, in the same order. `fitted`: what maps and heads were fitted to, in words.
    """
    held_out = f"Fitted on {fitted}, measured on test inputs."
    parts = {family: [reading.hits for reading in by_task.values()] for family, by_task in readings.items()}
    parts["expert"] = list(experts.values())
    distances, divergences = (
        {family: fmean(getattr(one, name) for one in by_task.values()) for family, by_task in readings.items()}
        for name in ("distance", "kl")
    )
    return (
        Bars(
            "families-accuracy",
            "Accuracy under each family of maps",
            f"Merged features are mapped, then read by the expert's head; mean of tasks, 95 % interval. {held_out}",
            tuple(parts),
            "accuracy, %",
            (_intervals("mean of tasks", list(parts.values())),),
        ),
        _bars(
            "families-distance",
            "Distance to the expert's features",
            f"Mean distance, as a share of how far the expert's features lie from their mean. {held_out}",
            "relative distance",
            {family: distance for family, distance in distances.items() if not math.isnan(distance)},
        ),
        _bars(
            "families-kl",
            "Divergence from the expert's outputs",
            f"Mean KL from the expert's class probabilities; lower is nearer. {held_out}",
            "KL, nats",
            divergences,
        ),
        Heat(
            "families-by-task",
            "Accuracy under each family, by task",
            f"As above, task by task. {held_out}",
            tuple(parts),
            tuple(experts),
            tuple(tuple(round(100 * float(part.mean()), 2) for part in row) for row in parts.values()),
            "accuracy, %",
        ),
    )


def accuracy_figure(hits: Mapping[str, Mapping[str, Hits]], base: Mapping[str, Hits] | float | None) -> Bars:
    """Accuracy by task and in the mean, from hits by classifier and task; of the base if its hits are known."""
    tasks = tuple(next(iter(hits.values())))
    hits = {**hits, "base": base} if isinstance(base, Mapping) else hits
    rows = {name: [[part] for part in by_task.values()] + [list(by_task.values())] for name, by_task in hits.items()}
    return Bars(
        "accuracy",
        "Accuracy by task",
        "On test inputs, with 95 % intervals. Aligned: heads fitted to unlabelled inputs of another split; a probe saw "
        "their labels too.",
        (*tasks, "mean"),
        "accuracy, %",
        tuple(_intervals(name, groups) for name, groups in rows.items()),
    )


def mean_accuracy(parts: Sequence[Hits]) -> tuple[float, float, float]:
    """Mean accuracy of tasks in percent, and its interval."""
    scores = [Score(float(part.mean()), *wilson(int(part.sum()), len(part)), len(part)) for part in parts]
    middle, low, high = mean_interval(scores)
    return 100 * middle, 100 * max(0.0, low), 100 * min(1.0, high)


def _intervals(name: str, groups: Sequence[Sequence[Hits]]) -> Series:
    """A mean accuracy per group of tasks."""
    values, low, high = zip(*map(mean_accuracy, groups), strict=True)
    return Series(name, values, low, high)


def _bars(key: str, title: str, caption: str, unit: str, values: Mapping[str, float]) -> Bars:
    return Bars(key, title, caption, tuple(values), unit, (Series("mean of tasks", tuple(values.values())),))
