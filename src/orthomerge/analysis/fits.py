"""What the manifest of a fitted merge tells: how the loss fell, and which coefficients were found.

`fit.curve` has a row for every look at the fit; `fit.facts.coefficients` those of AdaMerging (Yang et al. 2024, arXiv
2310.02575): by task a number, or one for every tensor, of which a layer's mean is shown. A manifest may be anybody's:
what is not as it should be is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from orthomerge.analysis.conflict import in_order, layer_of
from orthomerge.analysis.figures import Curve, Heat, Lines

_LOSSES = {
    "loss": ("fit-loss", "Training loss of the fit", "Mean of the batches since the last look, summed over tasks."),
    "held_out": ("fit-held-out", "Held-out loss of the fit", "On inputs that were only looked at, mean over tasks."),
}


def fit_figures(manifest: Mapping[str, Any]) -> tuple[Lines | Heat, ...]:
    """All that there is to draw of a manifest's `fit`; nothing of a merge that was not fitted."""
    fit = manifest.get("fit")
    if not isinstance(fit, Mapping):
        return ()
    curve, facts = fit.get("curve"), fit.get("facts")
    found: list[Lines | Heat] = list(loss_figures(curve)) if isinstance(curve, list) else []
    if isinstance(facts, Mapping) and (heat := coefficient_figure(facts.get("coefficients"))) is not None:
        found.append(heat)
    return tuple(found)


def loss_figures(rows: Sequence[Any]) -> tuple[Lines, ...]:
    """Training and held-out loss over the steps, each where there are two looks or more; their scales differ."""
    figures = []
    for name, (key, title, caption) in _LOSSES.items():
        points = [(row["step"], row[name]) for row in rows if isinstance(row, Mapping) and _numbers(row, "step", name)]
        if len(points) > 1:
            x, y = zip(*points, strict=True)
            figures.append(Lines(key, title, caption, "step", "loss", (Curve("loss", _floats(x), _floats(y)),)))
    return tuple(figures)


def coefficient_figure(table: object) -> Heat | None:
    """Coefficients by layer and task; None where the table is no such thing."""
    if not isinstance(table, Mapping) or not table:
        return None
    by_task: dict[str, dict[str, list[float]]] = {}
    for task, values in table.items():
        given = values if isinstance(values, Mapping) else {"": values}
        groups: dict[str, list[float]] = {}
        for name, value in given.items():
            if not _is_number(value):
                return None
            groups.setdefault(layer_of(str(name)) if name else "all layers", []).append(float(value))
        by_task[str(task)] = groups
    layers = {layer for groups in by_task.values() for layer in groups}
    rows = ("all layers",) if layers == {"all layers"} else in_order(layers - {"all layers"})
    values = tuple(tuple(_mean(groups.get(row, [])) for groups in by_task.values()) for row in rows)
    return Heat(
        "coefficients",
        "How much of each expert was taken",
        "Coefficient of each task vector as the fit left it, mean over the tensors of a layer.",
        rows,
        tuple(by_task),
        values,
        "coefficient",
    )


def _floats(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(map(float, values))


def _numbers(row: Mapping[str, Any], *keys: str) -> bool:
    return all(_is_number(row.get(key)) for key in keys)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
