"""What the figures of the gallery show, in sentences with their numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from orthomerge.analysis.diagnosis import Bars, Curve, Diagnosis, Figure, Heat, Lines, Points

Figures = Mapping[str, Figure]
Said = Callable[[Figures, Diagnosis], str]


def say_accuracy(figures: Figures, found: Diagnosis) -> str:
    bars = _bars(figures, "accuracy")
    means = [f"{series.name} {series.values[-1]:.1f} %" for series in bars.series]
    return f"in the mean of {len(found.tasks)} tasks, {', '.join(means)}."


def say_tsne(figures: Figures, found: Diagnosis) -> str:
    points = [figure for figure in figures.values() if isinstance(figure, Points)]
    rows = [f"{figure.task}: {', '.join(view.title for view in figure.views)}" for figure in points]
    return "; ".join(rows) + "."


def say_families(figures: Figures, found: Diagnosis) -> str:
    bars = _bars(figures, "families-accuracy")
    values = dict(zip(bars.groups, bars.series[0].values, strict=True))
    shown = [f"{name} {values[name]:.1f} %" for name in ("none", "orthogonal", "linear", "affine") if name in values]
    gain, most = values["orthogonal"] - values["none"], max(values["linear"], values["affine"]) - values["none"]
    text = f"mean accuracy under the expert's head is {', '.join(shown)}; the experts have {values['expert']:.1f} %."
    if most < 1:
        return text
    if gain <= 0:
        return f"{text} A rotation alone wins nothing here: what is missing is no rotation."
    return f"{text} A rotation wins {min(100 * gain / most, 100):.0f} % of what the freest linear map wins."


def say_geometry(cosine: str, coefficient: str) -> Said:
    def say(figures: Figures, found: Diagnosis) -> str:
        parts = []
        for key, name in ((cosine, "cosine"), (coefficient, "coefficient")):
            middles = [f"{curve.name} {_middle(curve):.2f}" for curve in _lines(figures, key).curves]
            parts.append(f"mean {name} {', '.join(middles)}")
        return "; ".join(parts) + "."

    return say


def say_layers(figures: Figures, found: Diagnosis) -> str:
    heat = _heat(figures, "cka-layers")
    rows = [(name, _mean(row)) for name, row in zip(heat.rows, heat.values, strict=True)]
    known = [(name, value) for name, value in rows if not math.isnan(value)]
    (first, high), (last, low) = known[0], known[-1]
    return f"merged and expert are at {high:.2f} in {first} and at {low:.2f} in the {last}, mean of tasks."


def say_conflict(figures: Figures, found: Diagnosis) -> str:
    cosines, signs = _heat(figures, "vector-cosines"), _heat(figures, "sign-conflicts")
    pairs = [(row, column) for row in range(len(signs.rows)) for column in range(row)]
    row, column = max(pairs, key=lambda pair: signs.values[pair[0]][pair[1]])
    norms = _heat(figures, "vector-norms")
    sizes = [_mean([values[place] for values in norms.values]) for place in range(len(norms.columns))]
    far = max(range(len(sizes)), key=sizes.__getitem__)
    return (
        f"the mean cosine of two task vectors is {fmean(cosines.values[one][two] for one, two in pairs):.2f}; most "
        f"conflict is between {signs.rows[row]} and {signs.rows[column]}, {signs.values[row][column]:.1f} % of the "
        f"signs (50 % is chance); {norms.columns[far]} moved furthest, by {sizes[far]:.1f} % of the base's weights."
    )


def say_scale(figures: Figures, found: Diagnosis) -> str:
    mean = _lines(figures, "scale").curves[0]
    best = max(range(len(mean.x)), key=lambda place: mean.y[place])
    return (
        f"the best mean, {mean.y[best]:.1f} % of the experts', is at {mean.x[best]:g}; it is {mean.y[0]:.1f} % at "
        f"{mean.x[0]:g} and {mean.y[-1]:.1f} % at {mean.x[-1]:g}."
    )


def say_fits(figures: Figures, found: Diagnosis) -> str:
    parts = []
    for method in ("moma", "realign"):
        lines = figures.get(f"{method}-loss")
        if isinstance(lines, Lines):
            curve = lines.curves[-1]
            parts.append(f"{method}, {curve.name}, from {curve.y[0]:.3g} to {curve.y[-1]:.3g}{_scored(found, method)}")
    return "; ".join(parts) + "."


def say_masking(figures: Figures, found: Diagnosis) -> str:
    parts = []
    if "masking" in figures:
        bars = _bars(figures, "masking")
        rates = dict(zip(bars.groups, bars.series[0].values, strict=True))
        least, most = min(rates, key=rates.__getitem__), max(rates, key=rates.__getitem__)
        parts.append(f"from {rates[least]:.0f} % ({least}) to {rates[most]:.0f} % ({most}) is masked")
    if "masking-accuracy" in figures:
        curve = _lines(figures, "masking-accuracy").curves[0]
        points = [f"{y:.1f} % at {x:.0f} % masked" for x, y in zip(curve.x, curve.y, strict=True)]
        parts.append(f"accuracy is {', '.join(points)}")
    return "; ".join(parts) + "."


def say_coefficients(figures: Figures, found: Diagnosis) -> str:
    heat = _heat(figures, "coefficients")
    means = {task: _mean([row[place] for row in heat.values]) for place, task in enumerate(heat.columns)}
    least, most = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    spread = [value for row in heat.values for value in row if not math.isnan(value)]
    return (
        f"from a start of {100 * found.facts['scale']:g} %, layers end between {min(spread):.0f} and {max(spread):.0f} "
        f"%; most is taken of {most} ({means[most]:.0f} %), least of {least} ({means[least]:.0f} %)"
        f"{_scored(found, 'adamerging')}."
    )


def say_shots(figures: Figures, found: Diagnosis) -> str:
    parts = []
    for curve in _lines(figures, "shots").curves:
        if curve.low is None and len(set(curve.y)) == 1:
            parts.append(f"{curve.name} {curve.y[0]:.1f} %")
        else:
            ends = f"{curve.y[0]:.1f} % with {curve.x[0]:g} a class to {curve.y[-1]:.1f} % with {curve.x[-1]:g}"
            parts.append(f"{curve.name} from {ends}")
    return "; ".join(parts) + "."


def _scored(found: Diagnosis, method: str) -> str:
    accuracy = found.facts.get("accuracy", {}).get(method)
    return "" if accuracy is None else f", which scores {accuracy:.1f} % on test inputs"


def _middle(curve: Curve) -> float:
    """The mean of a density."""
    weights = [max(y, 0.0) for y in curve.y]
    return math.fsum(x * weight for x, weight in zip(curve.x, weights, strict=True)) / (math.fsum(weights) or math.nan)


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan


def _bars(figures: Figures, key: str) -> Bars:
    found = figures[key]
    if not isinstance(found, Bars):
        raise TypeError(f"{key!r} must be bars")
    return found


def _heat(figures: Figures, key: str) -> Heat:
    found = figures[key]
    if not isinstance(found, Heat):
        raise TypeError(f"{key!r} must be a heat map")
    return found


def _lines(figures: Figures, key: str) -> Lines:
    found = figures[key]
    if not isinstance(found, Lines):
        raise TypeError(f"{key!r} must be lines")
    return found
