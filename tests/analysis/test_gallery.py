"""The gallery of a suite that is made in a moment: measured, written, read back and, where matplotlib is, drawn."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from benchmarks.gallery import drawn
from benchmarks.gallery_measures import Plan, expected_keys, joined, measure
from benchmarks.gallery_pages import SECTIONS
from tests.analysis.making import PROCESSOR, Toy

from orthomerge.analysis.diagnosis import Diagnosis, Heat, Lines, Points, write_diagnosis
from orthomerge.core.errors import RecipeError
from orthomerge.suites.suite import Suite

PLAN = Plan(
    about="- command: `python benchmarks/gallery.py`", steps=2, points=20, layers=16, shots=(1, 2), draws=2,
    scales=(0.5, 1.0), decays=(5e-9, 1.0), device="cpu",
)  # fmt: skip


@pytest.fixture(scope="module")
def suite(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Suite:
    folder = tmp_path_factory.mktemp("suite")
    (folder / "base").symlink_to(toy.folder / "base")
    return Suite("toy", folder, toy.tasks, PROCESSOR, {task: toy.folder / task for task in toy.tasks})


@pytest.fixture(scope="module")
def found(suite: Suite) -> Diagnosis:
    return measure(suite, PLAN)


def test_every_figure_is_measured_and_has_a_place_on_the_page(found: Diagnosis, suite: Suite) -> None:
    figures = {figure.key: figure for figure in found.figures}
    assert list(figures) == expected_keys("toy", tuple(suite.tasks))
    assert found.facts["suite"] == "toy"
    assert found.facts["left_out"] == {}
    assert set(found.facts["accuracy"]) == {"moma", "realign", "adamerging"}
    points, signs, shots = figures["tsne-where"], figures["sign-conflicts"], figures["shots"]
    assert isinstance(points, Points)
    assert points.images == points.texts == ()
    assert isinstance(signs, Heat)
    assert [math.isnan(value) for row in signs.values for value in row] == [True, False, False, True]
    assert isinstance(shots, Lines)
    names = [curve.name for curve in shots.curves]
    assert names == ["knn", "aligned-c", "aligner surgery", "aligner auto", "as it is", "expert"]
    assert all(curve.low is not None for curve in shots.curves[:4])
    places = [key for section in SECTIONS for key in section.keys]
    for key in figures:
        assert [place for place in places if re.fullmatch(place.replace("*", ".*"), key)], key
    keys = expected_keys("text8", ("ag_news", "yelp5", "dbpedia14", "trec6", "sst5"))
    tsne = [key for key in keys if key.startswith("tsne-")]
    assert tsne == ["tsne-ag-news", "tsne-dbpedia14", "tsne-trec6", "tsne-sst5"]
    assert len(keys) == len(set(keys)) == 27


def test_parts_that_were_measured_apart(suite: Suite) -> None:
    """Are those of one gallery; parts that are not alike are refused."""
    common = Plan(about="- one", scale=0.5, steps=2, scales=(0.5,), limit=20, device="cpu")
    looked = measure(suite, replace(common, parts=("scale",)))
    fitted = measure(suite, replace(common, parts=("adamerging",), about="- other"))
    assert fitted.verdict == ()
    found = joined([fitted, looked])
    assert [figure.key for figure in found.figures] == ["scale", "coefficients"]
    assert found.verdict == looked.verdict
    assert found.facts["about"] == "- other\n\n- one"
    assert set(found.facts["accuracy"]) == {"adamerging"}
    with pytest.raises(RecipeError, match="'steps' is 2 in one part and 3 in another"):
        joined([looked, replace(fitted, facts={**fitted.facts, "steps": 3})])


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="drawing needs matplotlib")
def test_it_is_drawn(found: Diagnosis, tmp_path: Path) -> None:
    one_of_each_kind = {type(figure): figure for figure in found.figures}
    found = replace(found, figures=tuple(one_of_each_kind.values()))
    write_diagnosis(tmp_path / "figures.json", found)
    (tmp_path / "docs").mkdir()
    drawn([tmp_path / "figures.json"], tmp_path / "docs" / "images", tmp_path / "docs" / "gallery")
    pictures = tmp_path / "docs" / "images" / "toy"
    assert sorted(file.stem for file in pictures.glob("*.png")) == sorted(figure.key for figure in found.figures)
    assert max(file.stat().st_size for file in pictures.glob("*.png")) < 60_000
    page = tmp_path / "docs" / "gallery" / "toy.md"
    links = re.findall(r"\]\(([^)]+)\)", page.read_text())
    assert links.count(f"../images/toy/{found.figures[0].key}.png") == 1
    assert all((page.parent / link).is_file() for link in links if "diagnosis.md" not in link)
    assert "nan" not in page.read_text().split("## How it was made")[0].split()
