"""Compare one task: the distance of mapped features to the expert's, by family of maps, and the heads' predictions.

Maps and heads are fitted to one split and measured on another; only the probe uses labels of the first.

MOMA, arXiv 2412.13526 v3, Eq. 7, Table 1 and Figure 4. The best map of a family is found by the aligner of that name,
which folds it into the first linear map of a head: if that is the identity, the result is the map.

Differs from the paper: squared distances, a prior at the identity, closed forms; see `alignment`. As in its Table 1
only the affine map has a shift; `rigid`, the orthogonal map with a shift, is ours. The paper shows the training loss;
here maps are measured on held-out inputs.

Letters: H, T [n, d] input of the head from merged encoder and expert; G(h) = A h + c a map; z, z_T [n, C] logits.
Distance: mean |G(h) - t| / mean |t - mean t|, 1 for the constant guess mean t. KL: mean KL(softmax z_T, softmax z).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch

from orthomerge.alignment.aligners import make_aligner
from orthomerge.alignment.folding import first_map, logits_from, read_by
from orthomerge.alignment.problem import Problem
from orthomerge.analysis.detail import Detail, chosen_inputs
from orthomerge.analysis.diagnosis import Bars, Heat, Series
from orthomerge.analysis.geometry import SHOWN, Geometry
from orthomerge.analysis.recovery import Estimate, Hits, HitsByTask
from orthomerge.core.errors import RecipeError
from orthomerge.evaluation.metrics import Score, hits, mean_interval, wilson
from orthomerge.evaluation.probe import Probe
from orthomerge.evaluation.protocols import Aligned, Evidence
from orthomerge.models.features import FeaturePair, Features
from orthomerge.models.heads import Classifier, Head, Linear, head_kind, logits_of

FAMILIES = ("none", "scaling", "orthogonal", "similarity", "rigid", "invertible", "linear", "affine")
_SHIFTED = ("rigid", "affine")
_WORK = 1 << 28  # inputs x classes x features of a probe: about half a minute

Map = Callable[[torch.Tensor], torch.Tensor]  # G of every row [n, d], in float64


@dataclass(frozen=True)
class Reading:
    """Result of one classifier on test inputs. `distance`: NaN if no map of features is involved."""

    distance: float
    kl: float
    hits: Hits


def fit_maps(H: torch.Tensor, T: torch.Tensor, *, task: str) -> dict[str, Map]:
    """Fit the best map of every family to all rows; from a single row, the identity."""
    problems = {biased: _problem(H, T, task, biased=biased) for biased in (False, True)}
    maps: dict[str, Map] = {"none": torch.Tensor.double}
    for family in FAMILIES[1:]:
        aligner: Any = make_aligner("orthogonal" if family == "rigid" else family)
        maps[family] = first_map(aligner.align(problems[family in _SHIFTED]).classifier)
    return maps


def _problem(H: torch.Tensor, T: torch.Tensor, task: str, *, biased: bool) -> Problem:
    """Return the alignment problem of a head whose first map is the identity."""
    pair, d = FeaturePair(Features(H.double(), task, "train"), Features(T.double(), task, "train")), H.shape[1]
    identity = Linear(torch.eye(d, dtype=torch.float64), torch.zeros(d, dtype=torch.float64) if biased else None)
    blank = Linear(torch.zeros(1, d, dtype=torch.float64))
    return Problem.of(pair, Head(blank, ("",), identity, "tanh"))


def read_logits(
    z: torch.Tensor, z_T: torch.Tensor, *, head: Head, truth: torch.Tensor, distance: float = math.nan
) -> Reading:
    kind = head_kind(head.kind)
    kl = max(0.0, float(kind.divergence(z.double(), z_T.double()).mean()))
    return Reading(distance, kl, hits(kind.choices(z), truth, head.kind).numpy())


def relative_distance(mapped: torch.Tensor, T: torch.Tensor) -> float:
    """Return the distance as defined above; NaN if the expert's features are constant."""
    spread = float((T - T.mean(0)).norm(dim=1).mean())
    return float((mapped - T).norm(dim=1).mean()) / spread if spread > 0 else math.nan


@dataclass(frozen=True)
class TaskComparison:
    """Readings by family of maps, of the merge's own classifier if it differs from the expert's, and of the aligner.

    `predicted`, `hits` [n]: by expert, merged, aligned and probe. `head`: the expert's. `mapped`, `fitted`, `probed`:
    numbers of inputs that maps, aligner and probe were fitted to.
    """

    geometry: Mapping[str, Geometry]
    readings: Mapping[str, Reading]
    predicted: Mapping[str, torch.Tensor]
    hits: Mapping[str, Hits]
    head: Head
    aligned: Classifier
    mapped: int
    fitted: int
    probed: int


def compare_task(
    support: FeaturePair, test: FeaturePair, *, head: Head, classifier: Classifier, detail: Detail
) -> TaskComparison:
    """Fit maps, aligner and probe to the support and measure them on test. `classifier`: the merge's own."""
    truth, seed = test.merged.labels, detail.seed
    if truth is None:
        raise RecipeError(f"the test split of {test.merged.task!r} has no labels; give labelled data")
    H, T = read_by(head, test.merged.values), read_by(head, test.expert.values)
    H_fit, T_fit = (read_by(head, _sample(side, detail.maps, seed).values) for side in (support.merged, support.expert))
    maps = fit_maps(H_fit, T_fit, task=test.merged.task)
    mapped, teacher = {name: G(H) for name, G in maps.items()}, logits_from(head, T)
    readings = {
        name: read_logits(logits_from(head, X), teacher, head=head, truth=truth, distance=relative_distance(X, T))
        for name, X in mapped.items()
    }
    evidence = Evidence(head, support.merged.unlabelled(), support.expert.unlabelled(), seed)
    aligned = Aligned(make_aligner(detail.aligner)).build(evidence)
    logits = {"expert": logits_of(head, test.expert.values)}
    logits |= {name: logits_of(own, test.merged.values) for name, own in (("merged", classifier), ("aligned", aligned))}
    own, best = (read_logits(logits[name], logits["expert"], head=head, truth=truth) for name in ("merged", "aligned"))
    if not np.isclose(own.kl, readings["none"].kl, rtol=1e-4, atol=1e-6):
        readings["as it is"] = own
    readings[f"aligner {detail.aligner}"] = best
    probed = 0
    if detail.probe and support.merged.labels is not None:
        most = min(detail.maps, max(_WORK // (len(head.labels) * head.width), 1))
        labelled = _sample(support.merged, most, seed)
        probe, probed = Probe().build(Evidence(head, labelled, seed=seed)), len(labelled)
        logits["probe"] = logits_of(probe, test.merged.values)
    predicted = {name: head_kind(head.kind).choices(z).cpu() for name, z in logits.items()}
    by_name = {name: hits(choices, truth, head.kind).numpy() for name, choices in predicted.items()}
    geometry = {name: Geometry.of(mapped[name], T) for name in SHOWN}
    counts = {"mapped": len(H_fit), "fitted": len(support.merged), "probed": probed}
    return TaskComparison(geometry, readings, predicted, by_name, head, aligned, **counts)


def _sample(features: Features, most: int, seed: int) -> Features:
    return features.take(torch.from_numpy(chosen_inputs(None, len(features), most=most, seed=seed)))


def family_figures(
    readings: Mapping[str, Mapping[str, Reading]], experts: HitsByTask, *, fitted: str
) -> tuple[Bars | Heat, ...]:
    """Make figures of readings by family and task, and of the experts' hits by task, in the same order.

    `fitted`: description of the inputs that maps and heads were fitted to.
    """
    held_out = f"Fitted on {fitted}, measured on test inputs."
    parts = {family: [reading.hits for reading in by_task.values()] for family, by_task in readings.items()}
    parts["expert"] = list(experts.values())
    distances, divergences = (
        {family: fmean(getattr(reading, name) for reading in by_task.values()) for family, by_task in readings.items()}
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


def accuracy_figure(hits: Mapping[str, HitsByTask]) -> Bars:
    tasks = tuple(next(iter(hits.values())))
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


def mean_accuracy(parts: Sequence[Hits]) -> Estimate:
    """Return the mean accuracy over tasks in percent, with its interval."""
    scores = [Score(float(part.mean()), *wilson(int(part.sum()), len(part)), len(part)) for part in parts]
    middle, low, high = mean_interval(scores)
    return Estimate(100 * middle, 100 * max(0.0, low), 100 * min(1.0, high))


def _intervals(name: str, groups: Sequence[Sequence[Hits]]) -> Series:
    means = [mean_accuracy(parts) for parts in groups]
    low, high = tuple(mean.low for mean in means), tuple(mean.high for mean in means)
    return Series(name, tuple(mean.value for mean in means), low, high)


def _bars(key: str, title: str, caption: str, unit: str, values: Mapping[str, float]) -> Bars:
    return Bars(key, title, caption, tuple(values), unit, (Series("mean of tasks", tuple(values.values())),))
