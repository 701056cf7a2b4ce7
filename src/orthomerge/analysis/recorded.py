"""Figures and witnesses from the records of a run: scores, a search over scales, and a fit.

The curves of MOMA, arXiv 2412.13526 v3, Figures 3 and 12 to 15, and of the scale in task arithmetic (Ilharco et al.
2023, arXiv 2212.04089). Coefficients are those of AdaMerging (Yang et al. 2024, arXiv 2310.02575): one number per task,
or one per tensor, averaged by layer. Masks are those of MOMA (Figure 8).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from orthomerge.analysis.conflict import in_order, layer_of
from orthomerge.analysis.diagnosis import Bars, Curve, Heat, Lines, Series
from orthomerge.analysis.recovery import Estimate
from orthomerge.evaluation.records import Record, Way
from orthomerge.evaluation.scale import ScaleSearch
from orthomerge.evaluation.tables import Line, lines

_WITH_LABELS = ("knn", "probe")
_WHOLE = "all layers"
_LOSSES = {
    "loss": ("fit-loss", "Training loss of the fit", "Mean of the batches since the point before, summed over tasks."),
    "held_out": ("fit-held-out", "Held-out loss of the fit", "On inputs not used for training, mean over tasks."),
}


def recorded_witnesses(records: Sequence[Record], tasks: Sequence[str], *, model: str) -> dict[str, Estimate]:
    """Return inductive scores of protocols with labels, on all tasks, for the model with the digest `model`."""
    return {
        line.way.title: Estimate(line.mean, line.low, line.high)
        for line in lines(record for record in records if record.inputs.get("model") == model)
        if line.way.protocol in _WITH_LABELS and line.way.access == "inductive" and set(line.values) == set(tasks)
    }


def recorded_name(records: Sequence[Record], name: str, *, model: str) -> str:
    """Return the name in the records of the model with the digest `model`, or `name`."""
    return next((record.method for record in records if record.inputs.get("model") == model), name)


def scale_figure(search: ScaleSearch) -> Lines:
    scales = tuple(sorted(search.curve))
    values = {"mean of tasks": tuple(search.means[scale] for scale in scales)}
    for task in search.curve[scales[0]]:
        values[task] = tuple(search.curve[scale][task] for scale in scales)
    unit = {"accuracy": "accuracy, % of the expert's", "agreement": "agreement with the expert, %"}[search.criterion]
    curves = tuple(Curve(name, scales, scores) for name, scores in values.items())
    caption = f"Task vectors times lambda, on validation inputs; the best mean is at {search.best:g}."
    return Lines("scale", "How much the scale matters", caption, "lambda", unit, curves)


def shots_figure(records: Sequence[Record], *, method: str) -> Lines | None:
    """Plot mean accuracy, with its deviation over seeds, by inputs per class; None for a single number of inputs."""
    rows = lines(records)
    groups: dict[Way, list[Line]] = {}
    for line in rows:
        if line.method == method and line.way.shots is not None and line.way.shots >= 1:
            groups.setdefault(replace(line.way, shots=None), []).append(line)
    curves = [_shots_curve(way, group) for way, group in groups.items()]
    if len({count for curve in curves for count in curve.x}) < 2:
        return None
    all_inputs = (line for line in rows if line.method == method and line.way in groups)
    levels = {f"{line.way.title}, all inputs ({line.way.access})": line for line in all_inputs}
    current = {line.method: line for line in reversed(rows) if line.way.title == "current"}
    levels |= {name: current[model] for name, model in (("as it is", method), ("expert", "expert")) if model in current}
    ends = (min(curve.x[0] for curve in curves), max(curve.x[-1] for curve in curves))
    curves += [Curve(name, ends, (line.mean, line.mean)) for name, line in levels.items()]
    return Lines(
        "shots",
        "How many inputs it takes",
        "Mean accuracy of the merged encoder, read in each way, over the number of inputs per class that the reading "
        "may see. Bands: one deviation over draws, where there are several.",
        "inputs per class",
        "accuracy, %",
        tuple(curves),
        log_x=True,
    )


def _shots_curve(way: Way, group: Sequence[Line]) -> Curve:
    points = sorted(group, key=lambda line: line.way.shots or 0)
    x, y = tuple(float(line.way.shots or 0) for line in points), tuple(line.mean for line in points)
    name = f"{way.title} ({way.access})"
    if all(line.spread is None for line in points):
        return Curve(name, x, y)
    low, high = (tuple(line.mean + sign * (line.spread or 0.0) for line in points) for sign in (-1, 1))
    return Curve(name, x, y, low, high)


def fit_figures(facts: Mapping[str, Any]) -> tuple[Lines | Heat | Bars, ...]:
    """Make figures from the `fit` in the facts of a model; none if it was not fitted, or by a program unlike ours."""
    try:
        fit = facts["fit"]
        losses = loss_figures(fit.get("curve") or ())
        coefficients, masked = (fit["facts"].get(name) for name in ("coefficients", "masked_by_tensor"))
        tables = (coefficient_figure(coefficients or {}), masking_figure(masked or {}))
    except (AttributeError, KeyError, TypeError, ValueError):
        return ()
    return (*losses, *(figure for figure in tables if figure is not None))


def loss_figures(rows: Sequence[Mapping[str, float]]) -> tuple[Lines, ...]:
    """Make figures of training and held-out loss, each if it has two values or more; their scales differ."""
    figures = []
    for name, (key, title, caption) in _LOSSES.items():
        points = [(float(row["step"]), float(row[name])) for row in rows if math.isfinite(row.get(name, math.nan))]
        if len(points) > 1:
            x, y = zip(*points, strict=True)
            figures.append(Lines(key, title, caption, "step", "loss", (Curve("loss", x, y),)))
    return tuple(figures)


def coefficient_figure(table: Mapping[str, float | Mapping[str, float]]) -> Heat | None:
    """Make a heat map of coefficients by layer and task."""
    by_task: dict[str, dict[str, list[float]]] = {}
    for task, values in table.items():
        groups = by_task.setdefault(task, {})
        for name, value in (values if isinstance(values, Mapping) else {_WHOLE: values}).items():
            groups.setdefault(_WHOLE if name == _WHOLE else layer_of(name), []).append(float(value))
    layers = {layer for groups in by_task.values() for layer in groups}
    if not layers:
        return None
    rows = (_WHOLE,) if layers == {_WHOLE} else in_order(layers - {_WHOLE})
    return Heat(
        "coefficients",
        "How much of each expert was taken",
        "Coefficient of each task vector as the fit left it, mean over the tensors of a layer.",
        rows,
        tuple(by_task),
        tuple(tuple(fmean(groups.get(row, [math.nan])) for groups in by_task.values()) for row in rows),
        "coefficient",
    )


def masking_figure(table: Mapping[str, Mapping[str, float]]) -> Bars | None:
    """Make a figure of the elements that a mask makes less than half of, by layer."""
    masked, changed = defaultdict[str, float](float), defaultdict[str, float](float)
    for name, counts in table.items():
        masked[layer_of(name)] += counts["masked"]
        changed[layer_of(name)] += counts["of"]
    layers = tuple(layer for layer in in_order(changed) if changed[layer])
    if not layers:
        return None
    return Bars(
        "masking",
        "How much the mask takes away",
        "Share of the merged vector's elements that the mask makes less than half of; "
        f"{100 * sum(masked.values()) / sum(changed.values()):.1f} % in all.",
        layers,
        "%",
        (Series("masked", tuple(100 * masked[layer] / changed[layer] for layer in layers)),),
    )
