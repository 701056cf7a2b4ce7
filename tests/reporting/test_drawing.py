"""Drawings: every kind, the same bytes twice, and nothing of a label but its text."""

from __future__ import annotations

import csv
import io
import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import matplotlib as mpl
import pytest
from tests.reporting.making import ALERT, figures, points

from orthomerge.analysis.diagnosis import Bars, Figure, Heat, Lines, Points
from orthomerge.reporting.drawing import class_colours, draw, shown
from orthomerge.reporting.figure_data import figure_csv, inline_svg

ALL: list[Figure] = [*figures(), points("a"), points("b", images=True)]


@pytest.mark.parametrize("figure", ALL, ids=lambda figure: figure.key + type(figure).__name__)
def test_the_same_bytes_twice_and_nothing_global(figure: Figure) -> None:
    before = dict(mpl.rcParams)
    first, second = draw(figure), draw(figure)
    assert first == second
    assert first.png.startswith(b"\x89PNG")
    assert "<dc:date>" not in first.svg
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("kind", [Lines, Heat, Bars, Points])
@pytest.mark.parametrize("label", [ALERT, "$\\frac{", "_hidden", "日本", "a\nb", "", "x" * 400, "%s {0} \\"])
def test_any_label_can_be_drawn(kind: type, label: str) -> None:
    made = draw(_named(next(figure for figure in ALL if isinstance(figure, kind)), label))
    inline = inline_svg(made.text_svg, prefix="p-", label=label)
    for text in (made.svg, inline):
        elements = [str(element.tag).lower() for element in ET.fromstring(text).iter()]
        assert not [element for element in elements if element.endswith("script")]
    assert inline.startswith("<svg ")
    assert "style=" not in inline
    assert label != ALERT or "&lt;script&gt;alert(1)" in inline


def _named(figure: Figure, label: str) -> Figure:
    if isinstance(figure, Lines):
        curves = tuple(replace(curve, name=label) for curve in figure.curves)
        return replace(figure, title=label, x=label, curves=curves)
    if isinstance(figure, Heat):
        return replace(figure, rows=(label,) * len(figure.rows), columns=(label,) * len(figure.columns), unit=label)
    if isinstance(figure, Bars):
        series = tuple(replace(one, name=label) for one in figure.series)
        return replace(figure, groups=(label,) * len(figure.groups), series=series)
    views = tuple(replace(view, name=label, title=label) for view in figure.views)
    return replace(figure, classes=(label,) * len(figure.classes), views=views)


def test_ids_of_two_drawings_do_not_clash() -> None:
    drawn = draw(figures()[0]).text_svg
    one, two = (ET.fromstring(inline_svg(drawn, prefix=prefix, label="")) for prefix in ("a-", "b-"))
    ids = [{element.get("id") for element in root.iter() if element.get("id")} for root in (one, two)]
    assert ids[0]
    assert not ids[0] & ids[1]
    links = {element.get("href", "#")[1:] for element in one.iter("use")}
    assert links <= ids[0]


def test_colours_and_labels() -> None:
    assert [len(set(class_colours(count))) for count in (10, 37)] == [10, 37]
    assert shown("a" * 50) == "a" * 27 + "…"
    assert not shown("_x").startswith("_")


def table(figure: Figure) -> list[dict[str, str]]:
    """The rows of a figure's CSV."""
    return list(csv.DictReader(io.StringIO(figure_csv(figure))))


def numbers(rows: list[dict[str, str]], column: str) -> list[float]:
    return [float(row[column] or "nan") for row in rows]


def test_figures_as_csv_and_back() -> None:
    lines, heat, _, bars = figures()
    for curve in lines.curves:
        own = [row for row in table(lines) if row["curve"] == curve.name]
        for column, values in (("x", curve.x), ("y", curve.y), ("low", curve.low), ("high", curve.high)):
            assert values is None or numbers(own, column) == pytest.approx(list(values), nan_ok=True)
    for series in bars.series:
        own = [row for row in table(bars) if row["series"] == series.name]
        assert [row["group"] for row in own] == list(bars.groups)
        assert numbers(own, "value") == pytest.approx(list(series.values), nan_ok=True)
    for row, name, values in zip(table(heat), heat.rows, heat.values, strict=True):
        assert row.pop("") == name
        assert list(row) == list(heat.columns)
        assert [float(cell or "nan") for cell in row.values()] == pytest.approx(list(values), nan_ok=True)


def test_points_as_csv_and_back() -> None:
    figure = points("a")
    rows = table(figure)
    assert [row["true"] for row in rows] == [figure.classes[kind] for kind in figure.true]
    assert [row["text"] for row in rows] == list(figure.texts)
    for view in figure.views:
        assert numbers(rows, f"{view.name} x") == list(view.x)
        assert [row[f"{view.name} predicted"] for row in rows] == [figure.classes[kind] for kind in view.predicted]


def test_unknown_classes_and_missing_places() -> None:
    figure = points("a", count=4)
    views = (replace(view, x=(math.nan, *view.x[1:]), predicted=(-1, *view.predicted[1:])) for view in figure.views)
    figure = replace(figure, true=(-1, *figure.true[1:]), views=tuple(views))
    assert draw(figure).png
    assert [table(figure)[0][column] for column in ("true", "expert x", "expert predicted")] == [""] * 3
