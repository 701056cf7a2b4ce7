"""The cells of a sweep by hand, mistakes in the block, and how the best is chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.berts import write_tables
from tests.runs.making import SHARED, SWEEP, lay_out

from orthomerge.core.errors import OrthomergeError, RecipeError
from orthomerge.data.reading import read_task
from orthomerge.evaluation.records import Record
from orthomerge.runs.choosing import Failure, best_of, rows_of, sweep_csv, sweep_markdown
from orthomerge.runs.recipe import Recipe, read_recipe
from orthomerge.runs.sections import Sweep
from orthomerge.runs.variants import Cell, Variant, cells_of, check_sweep, protocols_for, splits_of, variants_of


def read(folder: Path, sweep: str, more: str = "") -> Recipe:
    path = folder / "recipe.yaml"
    path.write_text(f"{SHARED}{more}\nsweep: {sweep}\n")
    return read_recipe(path)


def test_cells_by_hand(berts: Path, tmp_path: Path) -> None:
    cells, experts = check_sweep(read_recipe(lay_out(berts, tmp_path, SWEEP)))
    assert experts.tasks == ("two", "three")
    shown = [(cell.variant.name, cell.variant.first, cell.way.aligner, cell.way.shots, cell.seed) for cell in cells]
    once = [(None, None, 0), ("ridge", 2, 0), ("ridge", 2, 1), ("ridge", None, 0)]
    drawn = [(None, None), ("ridge", 2), ("ridge", None)]
    plain = ("average", "task_arithmetic scale=0.3", "task_arithmetic scale=0.6")
    assert shown == [(name, 0, *rest) for name in plain for rest in once] + [
        (f"dare drop=0.5 scale={scale}", seed, *rest, seed) for scale in (0.3, 0.6) for seed in (0, 1) for rest in drawn
    ]
    assert cells[1].title == "average, aligner ridge, 2/class (inductive)"


def test_what_means_the_same_is_done_once(tmp_path: Path) -> None:
    own = "{method: ties, parameters: {scale: 0.3}}"
    recipe = read(tmp_path, f"{{methods: [ties, {own}, average], scales: [0.3, 1], seeds: 3, aligners: [none]}}")
    names = [variant.name for variant in variants_of(recipe)]
    assert names == ["ties scale=0.3", "ties scale=1", "average"]
    assert len(cells_of(recipe)) == 3
    assert [variant.name for variant in variants_of(read(tmp_path, "{scales: [0.1]}"))] == ["task_arithmetic scale=0.1"]


def test_protocols_of_evaluate_are_shared(tmp_path: Path) -> None:
    text = SHARED.replace("  device", "  protocols: [current, {protocol: knn, shots: 1}, {aligner: ridge}]\n  device")
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{text}sweep: {{aligners: [none, ridge], shots: [2, all], seeds: 2}}\n")
    protocols = protocols_for(read_recipe(path), Variant("a", first=3, seeds=2))
    assert {each.first for each in protocols} == {3}
    ways = [("current", None, None, 1), ("knn", None, 1, 2), ("current", "ridge", None, 1), ("current", "ridge", 2, 2)]
    assert [(each.name, each.aligner, each.shots, each.seeds) for each in protocols] == ways
    path.write_text(path.read_text().replace("shots: 1}", "shots: 1, seeds: 3}"))
    with pytest.raises(RecipeError, match="the 'seeds' of a sweep count for all protocols"):
        check_sweep(read_recipe(path))


def test_fits_draw_at_random(tmp_path: Path) -> None:
    fit = "seed: 7\nfit: {data: {two: two.csv, three: three.csv}, split: test}"
    recipe = read(tmp_path, "{methods: [regmean, average], seeds: 2, aligners: [none]}", fit)
    variants = [(variant.method, variant.first, variant.seen) for variant in variants_of(recipe)]
    assert variants == [("regmean", 0, "transductive"), ("regmean", 1, "transductive"), ("average", 0, "data-free")]
    merges = [variant.recipe(recipe) for variant in variants_of(recipe)]
    assert [(merge.seed, merge.fit is not None) for merge in merges] == [(7, True), (8, True), (7, False)]


@pytest.mark.parametrize(
    ("block", "more", "message"),
    [
        ("{methods: [tiess]}", "", "unknown method 'tiess'; did you mean 'ties'"),
        ("{methods: [{method: ties, parameters: {densty: 1}}]}", "", "did you mean 'density'"),
        ("{methods: [{method: ties, parameters: {density: 3}}]}", "", "density"),
        ("{aligners: [ridgee]}", "", "unknown aligner 'ridgee'; did you mean 'ridge'"),
        ("{methods: [moma]}", "", "moma"),
        ("{methods: [slerp, average]}", "fit: {data: {two: two.csv, three: three.csv}}", "no method of the sweep is"),
        ("{methods: [ties]}", "parameters: {scale: 1}", "'parameters' are of 'method'"),
        ("{}", "out: x", "'out' has no place in a sweep: 'keep: true'"),
        ("{}", "align: {data: {two: two.csv}}", "'align' has no place in a sweep: 'aligners' of the sweep align"),
        ("{}", "diagnose: true", "'diagnose' has no place in a sweep"),
    ],
)
def test_mistakes(berts: Path, tmp_path: Path, block: str, more: str, message: str) -> None:
    lay_out(berts, tmp_path)
    with pytest.raises(OrthomergeError, match=message):
        check_sweep(read(tmp_path, block, more))


def test_a_sweep_needs_its_blocks(berts: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="'sweep' needs data: give a section 'evaluate' too"):
        Recipe({"a": "b"}, sweep=Sweep())
    with pytest.raises(RecipeError, match="the recipe has no section 'sweep'; add one"):
        check_sweep(read_recipe(lay_out(berts, tmp_path, SHARED)))
    recipe = read(tmp_path, "{methods: [average], aligners: [none]}")
    assert recipe.evaluate is not None
    wrong = replace(recipe, evaluate=replace(recipe.evaluate, against="averge"))
    with pytest.raises(RecipeError, match="there is no 'averge' to compare with; did you mean 'average'"):
        check_sweep(wrong)


def test_where_the_best_is_chosen(tmp_path: Path) -> None:
    write_tables(tmp_path)
    tasks = {"two": read_task(tmp_path / "two.csv")}
    assert splits_of(Sweep(), "train", tasks) == ("test", "val")
    assert splits_of(Sweep(choose="test"), "train", tasks) == ("test",)
    no_val = {"two": replace(tasks["two"], splits={"test": tasks["two"]["test"]})}
    for support, data, why in (("val", tasks, "the protocols are fitted"), ("train", no_val, "'two' has no labelled")):
        assert splits_of(Sweep(), support, data) == ("test",)
        with pytest.raises(RecipeError, match=f"cannot be chosen on val: {why}"):
            splits_of(Sweep(choose="val"), support, data)


def record(method: str, value: float, *, task: str = "t", split: str = "test") -> Record:
    return Record(task, method, "current", "accuracy", value, value, value, 10, "data-free", split=split)


def test_the_best_on_validation_and_in_hindsight() -> None:
    test = [record("a", 0.5), record("b", 0.9), record("c", 0.7)]
    val = [record("a", 0.6, split="val"), record("b", 0.4, split="val"), record("c", 0.6, split="val")]
    cells = [Cell(Variant(name), test[0].way, 0) for name in "abc"]
    rows = rows_of(cells, test, val, [])
    (best,) = best_of(rows)
    assert best.budget == "no inputs"
    assert best.chosen is rows[0]  # of equals the first
    assert best.hindsight is rows[1]
    text = sweep_markdown(rows, [best], [], {"expert": 95.0})
    assert "| no inputs | a | current | val | 60.0 | 50.0 | 50.0-50.0 |" in text
    assert "| no inputs | b | current | test | 40.0 | 90.0 | 90.0-90.0 |" in text
    assert "expert 95.0" in text
    assert sweep_csv(rows, ["t"]).splitlines()[1:3] == [
        "no inputs,a,,a,current,data-free,,1,60.000,50.000,50.000,50.000,,50.000,",
        "no inputs,b,,b,current,data-free,,1,40.000,90.000,90.000,90.000,,90.000,",
    ]
    (late,) = best_of(rows_of(cells, test, [], []))
    assert (late.chosen, late.hindsight.variant.name) == (None, "b")
    assert "| current | val |" not in sweep_markdown(rows, [late], [], {})


def test_names_of_a_sweep_are_never_markup_or_formulas() -> None:
    rows = rows_of([Cell(Variant("=<b>\r|"), record("a", 0.5).way, 0)], [record("=<b>\r|", 0.5)], [], [])
    failure = Failure("x", record("a", 0.5).way, "<img>\x1b", "t/test")
    text = sweep_markdown(rows, best_of(rows), [failure], {})
    assert "=&lt;b&gt; \\|" in text
    assert "<img>" not in text
    assert "\x1b" not in text
    assert ",'=<b> |," in sweep_csv(rows, ["t"]).splitlines()[1]


def test_budgets_do_not_compete() -> None:
    blank = record("a", 0.5)
    few = replace(blank, shots=5, support="train", access="inductive", aligner="ridge").way
    half = replace(blank, shots=0.5, support="test", access="transductive", aligner="ridge").way
    every = replace(blank, support="train", access="inductive", aligner="ridge").way
    fitted = Variant("moma", seen="inductive")
    cells = [Cell(Variant("a"), way, 0) for way in (blank.way, few, half, every)]
    cells += [Cell(fitted, way, 0) for way in (replace(blank.way, access="inductive"), few)]
    plain = ["no inputs", "5 per class", "50% of the inputs (transductive)", "all inputs"]
    fits = ["the fit's inputs", "the fit's and 5 per class"]
    assert [row.budget for row in rows_of(cells, [], [], [])] == plain + fits


def test_the_example_is_read() -> None:
    recipe = read_recipe(Path(__file__).parents[2] / "examples/sweep.yaml")
    # Merges that draw nothing: average, and two at five scales; dare at five scales with three seeds.
    assert len(variants_of(recipe)) == 11 + 15
    # Heads as they are, two aligners with all inputs, and both with three numbers of few inputs and three draws.
    assert len(cells_of(recipe)) == 11 * (1 + 2 + 2 * 3 * 3) + 15 * (1 + 2 + 2 * 3)
