"""What accuracy depends on: the scale of the task vectors, and the number of inputs that a reading may see.

The curves of MOMA, arXiv 2412.13526 v3, Figures 3 and 12 to 15, and of the scale in task arithmetic (Ilharco et al.
2023, arXiv 2212.04089), from measurements that exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from orthomerge.analysis.figures import Curve, Lines
from orthomerge.core.errors import RecipeError
from orthomerge.evaluation.records import Record, Way
from orthomerge.evaluation.tables import Line, lines

if TYPE_CHECKING:
    from orthomerge.evaluation.scale import ScaleSearch


def scale_figure(search: ScaleSearch) -> Lines:
    """Score over lambda, by task and in the mean."""
    scales = tuple(sorted(search.curve))
    if not scales:
        raise RecipeError("a curve over scales needs at least one scale")
    tasks = tuple(search.curve[scales[0]])
    curves = [Curve("mean of tasks", scales, tuple(search.means[scale] for scale in scales))]
    curves += [Curve(task, scales, tuple(search.curve[scale][task] for scale in scales)) for task in tasks]
    what = {"accuracy": "accuracy, % of the expert's", "agreement": "agreement with the expert, %"}[search.criterion]
    return Lines(
        "scale",
        "How much the scale matters",
        f"Task vectors times lambda, on validation inputs; the best mean is at {search.best:g}.",
        "lambda",
        what,
        tuple(curves),
    )


def shots_figure(records: Sequence[Record], *, method: str, expert: str = "expert") -> Lines | None:
    """Mean accuracy over the number of inputs a class, within a deviation over seeds; None below two numbers."""
    found = lines(records)
    ours = [line for line in found if line.method == method]
    groups: dict[Way, list[Line]] = {}
    for line in ours:
        if line.shots is not None and line.shots >= 1:
            groups.setdefault(_without_shots(line.way), []).append(line)
    curves = [_curve(way, group) for way, group in groups.items()]
    if len({count for curve in curves for count in curve.x}) < 2:
        return None
    ends = (min(curve.x[0] for curve in curves), max(curve.x[-1] for curve in curves))
    flat = {f"{line.title}, all inputs ({line.access})": line for line in ours if line.way in groups}
    for name, who in (("as it is", method), ("expert", expert)):
        if (current := _current(found, who)) is not None:
            flat[name] = current
    curves += [Curve(name, ends, (line.mean, line.mean)) for name, line in flat.items()]
    return Lines(
        "shots",
        "How many inputs it takes",
        "Mean accuracy of the merged encoder, read in each way, over the number of inputs a class that the reading "
        "may see. Bands: one deviation over draws, where there are several.",
        "inputs a class",
        "accuracy, %",
        tuple(curves),
        log_x=True,
    )


def _curve(way: Way, group: Sequence[Line]) -> Curve:
    points = sorted(group, key=lambda line: line.shots or 0)
    x, y = tuple(float(line.shots or 0) for line in points), tuple(line.mean for line in points)
    name = f"{way.title} ({way.access})"
    if all(line.spread is None for line in points):
        return Curve(name, x, y)
    spread = [line.spread or 0.0 for line in points]
    low, high = (tuple(m + sign * s for m, s in zip(y, spread, strict=True)) for sign in (-1, 1))
    return Curve(name, x, y, low, high)


def _without_shots(way: Way) -> Way:
    return Way(way.protocol, way.options, None, way.access, way.support, way.aligner)


def _current(found: Sequence[Line], method: str) -> Line | None:
    plain = (line for line in found if line.method == method and line.protocol == "current" and line.shots is None)
    return next((line for line in plain if line.way.aligner is None), None)
