"""Figures and witnesses from the records of a run: scores, a search over scales, and a fit.

The curves of MOMA, arXiv 2412.13526 v3, Figures 3 and 12 to 15, and of the scale in task arithmetic (Ilharco et al.
2023, arXiv 2212.04089). Coefficients are those of AdaMerging (Yang et al. 2024, arXiv 2310.02575): one number per task,
or one per tensor, averaged by layer. A manifest may come from another program: malformed parts are left out.

The mask of MOMA (Section 4 and Figure 8), theta = theta_b + M * delta with delta the vector of the merge it started
from, follows from the weights: M = (theta - theta_b) / delta wherever delta is not zero. An element is masked where M
is less than half of its maximum, `cap`. Letters: theta, theta_b, delta, M [k], one block of elements.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from statistics import fmean
from typing import Any, cast

import torch

from orthomerge.analysis.conflict import in_order, layer_of
from orthomerge.analysis.figures import Bars, Curve, Heat, Lines, Series
from orthomerge.analysis.verdict import Witness
from orthomerge.core.errors import RecipeError
from orthomerge.evaluation.records import Record, Way
from orthomerge.evaluation.scale import ScaleSearch
from orthomerge.evaluation.tables import Line, lines
from orthomerge.merging.kinds import Block, SurveyMethod, TensorMethod
from orthomerge.merging.methods import make_method
from orthomerge.merging.stream import merge_blocks, prepare
from orthomerge.merging.vectors import TaskVectors
from orthomerge.models.tensors import Tensors

_WITH_LABELS = ("knn", "probe")
_WHOLE = "all layers"
_LOSSES = {
    "loss": ("fit-loss", "Training loss of the fit", "Mean of the batches since the point before, summed over tasks."),
    "held_out": ("fit-held-out", "Held-out loss of the fit", "On inputs not used for training, mean over tasks."),
}


def recorded_witnesses(records: Sequence[Record], tasks: Sequence[str], *, model: str) -> tuple[Witness, ...]:
    """Return inductive scores of protocols with labels, on all tasks, for the model with the digest `model`."""
    return tuple(
        Witness(line.title, line.mean, line.low, line.high)
        for line in lines(record for record in records if record.inputs.get("model") == model)
        if line.protocol in _WITH_LABELS and line.access == "inductive" and set(line.values) == set(tasks)
    )


def recorded_name(records: Sequence[Record], name: str, *, model: str) -> str:
    """Return the name of a model in the records: `name` if it occurs, else that of the model with its digest."""
    if any(record.method == name for record in records):
        return name
    return next((record.method for record in records if record.inputs.get("model") == model), name)


def recorded_base(records: Sequence[Record], tasks: Sequence[str]) -> float | None:
    base = (line for line in lines(records) if line.method == "base" and line.title == "current")
    return next((line.mean for line in base if set(line.values) == set(tasks)), None)


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
    levels = {f"{line.title}, all inputs ({line.access})": line for line in all_inputs}
    current = {line.method: line for line in reversed(rows) if line.title == "current"}
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


def fit_figures(facts: Mapping[str, Any]) -> tuple[Lines | Heat, ...]:
    """Make figures of losses and coefficients from the `fit` in the facts of a model, if it was fitted."""
    fit = _mapping(facts.get("fit"))
    coefficients = coefficient_figure(_mapping(fit.get("facts")).get("coefficients"))
    return (*loss_figures(fit.get("curve")), *(() if coefficients is None else (coefficients,)))


def loss_figures(rows: object) -> tuple[Lines, ...]:
    """Make figures of training and held-out loss, each if it has two values or more; their scales differ."""
    figures = []
    mappings = [_mapping(row) for row in rows] if isinstance(rows, list | tuple) else []
    for name, (key, title, caption) in _LOSSES.items():
        points = [(_number(row.get("step")), _number(row.get(name))) for row in mappings]
        points = [point for point in points if all(map(math.isfinite, point))]
        if len(points) > 1:
            x, y = zip(*points, strict=True)
            figures.append(Lines(key, title, caption, "step", "loss", (Curve("loss", x, y),)))
    return tuple(figures)


def coefficient_figure(table: object) -> Heat | None:
    """Make a heat map of coefficients by layer and task; None if the table is malformed."""
    by_task: dict[str, dict[str, list[float]]] = {}
    for task, values in _mapping(table).items():
        groups = by_task.setdefault(str(task), {})
        for name, value in (values if isinstance(values, Mapping) else {_WHOLE: values}).items():
            layer = _WHOLE if name == _WHOLE else layer_of(str(name))
            groups.setdefault(layer, []).append(_number(value))
    numbers = [value for groups in by_task.values() for values in groups.values() for value in values]
    if not numbers or not all(map(math.isfinite, numbers)):
        return None
    layers = {layer for groups in by_task.values() for layer in groups}
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


@dataclass(frozen=True)
class Masking:
    """Share of the changed elements that are masked: in total, and by layer."""

    total: float
    layers: dict[str, float]

    @classmethod
    def of(cls, counts: Iterable[tuple[str, int, int]]) -> Masking:
        """Sum the counts of `masked` over tensors, from their names, by layer."""
        masked_by_layer: dict[str, int] = {}
        changed: dict[str, int] = {}
        for name, masked_count, count in counts:
            layer = layer_of(name)
            masked_by_layer[layer] = masked_by_layer.get(layer, 0) + masked_count
            changed[layer] = changed.get(layer, 0) + count
        if not sum(changed.values()):
            raise RecipeError("a masking rate needs a start that differs from the base, got an equal one")
        rates = {layer: masked_by_layer[layer] / changed[layer] for layer in in_order(changed) if changed[layer]}
        return cls(sum(masked_by_layer.values()) / sum(changed.values()), rates)

    def figure(self) -> Bars:
        caption = "Share of the merged vector's elements that the mask makes less than half of; "
        caption += f"{100 * self.total:.1f} % in all."
        series = Series("masked", tuple(100 * rate for rate in self.layers.values()))
        return Bars("masking", "How much the mask takes away", caption, tuple(self.layers), "%", (series,))


def masked(theta: torch.Tensor, base: torch.Tensor, delta: torch.Tensor, *, cap: float = 1.0) -> tuple[int, int]:
    """Count masked elements, and elements in which the start differs from the base."""
    changed = delta != 0
    M = (theta.double() - base.double())[changed] / delta.double()[changed]
    return int((cap / 2 > M).sum()), int(changed.sum())


def start_masking(
    facts: Mapping[str, Any], tasks: Sequence[str], merged: Tensors, vectors: TaskVectors
) -> Masking | str:
    """Measure the mask of a model fitted by `moma`, whose start is merged again; return a message if there is none.

    `facts` and `tasks`: of the model. `vectors` must stream in the order of `merged`.
    """
    method = facts["method"]
    parameters = method["parameters"]
    if method["name"] != "moma" or parameters.get("mask") == "none":
        return f"{method['name']} trained no mask on the weights"
    if tuple(tasks) != vectors.tasks:
        return "the start can be merged again only from all experts, in the order of the merge"
    options = parameters.get("options", {})
    start = make_method(parameters["start"], options, tasks=vectors.tasks, seed=facts["seed"])
    tensor_method = prepare(cast("TensorMethod | SurveyMethod", start), vectors)  # moma accepts no other
    with closing(merge_blocks(vectors, tensor_method, _flat)) as blocks:
        return Masking.of(_counts(merged, blocks, vectors.shapes, cap=float(parameters.get("cap", 1.0))))


_FlatBlock = tuple[str, torch.Tensor, torch.Tensor]


def _flat(block: Block, weights: torch.Tensor) -> _FlatBlock:
    """Return name, base and vector of one block of the start."""
    return block.site.key, block.base.reshape(-1), (weights - block.base).reshape(-1)


def _counts(
    merged: Tensors, start: Iterator[_FlatBlock], names: Collection[str], *, cap: float
) -> Iterator[tuple[str, int, int]]:
    """Yield the counts of each block; the model and its start are streamed together."""
    for key, blocks in groupby(merged.blocks(), key=itemgetter(0)):
        theta = torch.cat([block.reshape(-1) for _, block in blocks])
        place = 0
        while key in names and place < len(theta):
            name, base, delta = next(start)
            if name != key:
                raise AssertionError(f"the model streams {key!r} where its start streams {name!r}")
            yield key, *masked(theta[place : place + len(base)].float(), base, delta, cap=cap)
            place += len(base)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> float:
    """Convert a number to float, anything else to NaN."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
