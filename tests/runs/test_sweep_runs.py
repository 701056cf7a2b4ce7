"""Whole sweeps: the same numbers after a kill, with a scale more, with cells that fail."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.berts import contents
from tests.calling import call, refused
from tests.runs.making import RUN, SHARED, SMALL, SWEPT_PLAIN, KillAt, Killed, lay_out, outcome

import orthomerge
from orthomerge.core.errors import OrthomergeError, OutputError
from orthomerge.evaluation.records import read_records
from orthomerge.files import publish
from orthomerge.models.saved import verify_folder
from orthomerge.runs import sweep as sweeping
from orthomerge.runs.recipe import Recipe
from orthomerge.runs.store import Store
from orthomerge.runs.sweep import RESULT, Swept
from orthomerge.runs.work import STORE

NAMES = ("average", "task_arithmetic scale=0.5")


@pytest.fixture(scope="module")
def serial(berts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Swept]:
    """A recipe and its sweep, which tests must leave as they are."""
    recipe = lay_out(berts, tmp_path_factory.mktemp("sweep"), RUN)
    return recipe, sweep(recipe, recipe.parent / "run")


def sweep(recipe: Path | Recipe, folder: Path, **options: Any) -> Swept:
    swept = orthomerge.run(recipe, out=folder, **options).swept
    assert swept is not None
    return swept


def copied(serial: tuple[Path, Swept], folder: Path) -> tuple[Path, Path]:
    shutil.copytree(serial[0].parent, folder / "copy", copy_function=shutil.copy2)
    return folder / "copy/recipe.yaml", folder / "copy/run"


def test_what_a_sweep_writes(serial: tuple[Path, Swept]) -> None:
    recipe, swept = serial
    run = recipe.parent / "run"
    assert (swept.cells, swept.failures, swept.found) == (4 + 6, [], 0)
    records = read_records(run / "records.jsonl")
    assert {record.split for record in records} == {"test"}
    assert {record.split for record in read_records(run / "validation.jsonl")} == {"val"}
    few = [record for record in records if record.method == "dare drop=0.5 scale=0.4" and record.shots == 2]
    drawn = sorted((record.task, record.seed, record.parameters["seed"]) for record in few)
    assert drawn == [("three", 0, 0), ("three", 1, 1), ("two", 0, 0), ("two", 1, 1)]
    page = (run / "report.html").read_text()
    for name in ("task_arithmetic scale=0.4", "dare drop=0.5 scale=0.4", "Two words"):
        assert name in page
    assert "best in hindsight" in json.loads((run / "notes.json").read_text())[-1]
    assert [best.budget for best in swept.best] == ["no inputs", "2 per class", "all inputs"]
    assert len(json.loads((run / "run.json").read_text())["manifests"]) == 3
    assert [path.name for path in run.rglob("*.safetensors")] == []  # models are scored in memory


def test_numbers_are_those_of_a_run(serial: tuple[Path, Swept], tmp_path: Path) -> None:
    recipe = tmp_path / "run.yaml"
    text = SHARED.replace("  device", "  protocols: [current, {aligner: ridge, shots: [2, all], seeds: 2}]\n  device")
    text = text.replace("report: {title: Two words}", "report: false\ndiagnose: false")
    recipe.write_text(f"{text}method: task_arithmetic\nparameters: {{scale: 0.4}}\n")
    for name in ("base", "two", "three", "two.csv", "three.csv"):
        (tmp_path / name).symlink_to(serial[0].parent / name)
    ran = orthomerge.run(recipe, out=tmp_path / "run")
    swept, plain = (
        {
            (record.task, record.method.partition(" ")[0], record.way, record.seed): record.value
            for record in read_records(folder / "records.jsonl")
            if record.method in ("base", "expert", "task_arithmetic", "task_arithmetic scale=0.4")
        }
        for folder in (serial[0].parent / "run", ran.folder)
    )
    assert swept == plain


def times(run: Path) -> dict[str, int]:
    """When each model was scored."""
    store = Store(run / STORE)
    entries = [entry for entry in store.entries() if (store.content(entry.key) / RESULT).exists()]
    return {entry.name: (store.content(entry.key) / RESULT).stat().st_mtime_ns for entry in entries}


def test_a_killed_sweep_goes_on(serial: tuple[Path, Swept], tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(Killed):
        sweep(serial[0], run, watch=KillAt("dare-drop=0.5-scale=0.4-seed1"))
    before = times(run)
    assert before.keys() == {"base", "expert", "task_arithmetic-scale=0.4", "dare-drop=0.5-scale=0.4"}
    swept, after = sweep(serial[0], run), times(run)
    assert (swept.done, swept.found) == (1, 4)
    assert {name: after[name] for name in before} == before
    assert outcome(run) == outcome(serial[0].parent / "run")


def test_a_scale_more(serial: tuple[Path, Swept], tmp_path: Path) -> None:
    recipe, run = copied(serial, tmp_path)
    before = times(run)
    recipe.write_text(RUN.replace("scales: [0.4]", "scales: [0.4, 0.9]"))
    swept, after = sweep(recipe, run), times(run)
    assert {name: after[name] for name in before} == before
    new = {"task_arithmetic-scale=0.9", "dare-drop=0.5-scale=0.9", "dare-drop=0.5-scale=0.9-seed1"}
    assert after.keys() - before.keys() == new
    assert (swept.done, swept.found, swept.cells) == (3, 5, 2 * (4 + 6))
    recipe.write_text(RUN)
    assert sweep(recipe, run).done == 0
    assert (times(run), outcome(run)) == (before, outcome(serial[0].parent / "run"))


def test_cells_that_fail(berts: Path, tmp_path: Path) -> None:
    large = "{method: dare, parameters: {scale: 1000000.0}}"
    methods = f"methods: [average, {large}, dare]"
    text = f"{SWEPT_PLAIN}dtype: float16\nsweep: {{{methods}, aligners: [none, ridge], shots: [2, 500]}}\n"
    recipe, run = lay_out(berts, tmp_path, text), tmp_path / "run"
    typed = refused("run", recipe, "--out", run, "--quiet", code=1)
    reasons = ("examples, fewer than 500 shots", "does not fit into F16 after the merge", "on two/test'")
    for message in ("6 cells failed, the others are done:", *reasons):
        assert message in typed
    text = (run / "sweep.md").read_text()
    assert "| 500 per class | average | aligner ridge, 500/class | failed |" in text
    assert "| 2 per class | average | aligner ridge, 2/class |  |" in text
    recipe.write_text(recipe.read_text().replace("1000000.0", "1.0").replace("500", "5"))
    mended = sweep(recipe, run)
    assert (mended.failures, mended.found) == ([], 0)  # other shots are other scores of every model


def test_what_might_pass_is_tried_again(berts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, run = lay_out(berts, tmp_path, SMALL.replace("[average, task_arithmetic]", "[slerp]")), tmp_path / "run"

    def out_of_memory(*_: object, **__: object) -> None:
        raise OrthomergeError("there is not enough memory")

    monkeypatch.setattr(sweeping, "merge", out_of_memory)
    failed = sweep(recipe, run)
    assert {failure.message for failure in failed.failures} == {"there is not enough memory"}
    assert {record.method for record in read_records(run / "records.jsonl")} == {"base", "expert"}
    monkeypatch.undo()
    passed = sweep(recipe, run)
    assert (passed.failures, passed.done) == ([], 1)


def test_the_command_line(berts: Path, tmp_path: Path) -> None:
    recipe, run = lay_out(berts, tmp_path, SMALL), tmp_path / "run"
    listed = [f"{name}, current (data-free), seed 0" for name in NAMES]
    assert call("run", recipe, "--out", run, "--list").stdout.splitlines() == [*listed, "2 cells"]
    assert not run.exists()
    assert len(json.loads(call("run", recipe, "--list", "--json").stdout)) == 2
    done = call("run", recipe, "--out", run)
    assert "2 cells from 2 merges; " in done.stderr
    assert "\nBest for each budget of inputs\n" in done.stdout
    assert "|" not in done.stdout  # no Markdown
    assert f"all cells: {run / 'sweep.csv'}" in done.stdout
    document = json.loads(call("run", recipe, "--out", run, "--json").stdout)
    assert document["models"] == {"done": 0, "found": 4}
    assert document["best"][0]["chosen"]["merge"] in NAMES


def test_models_that_are_kept(berts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, run = lay_out(berts, tmp_path, SMALL.replace("[none]}", "[none], keep: true}")), tmp_path / "run"
    with monkeypatch.context() as patch:  # a disk that is too small
        patch.setattr(publish.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1, 1, 0))  # type: ignore[attr-defined]
        with pytest.raises(OutputError, match=r"0\.00 GB free, but the output needs"):
            sweep(recipe, run)
    sweep(recipe, run)
    assert sorted(path.name for path in (run / "merges").glob("[a-z]*")) == ["average", "task_arithmetic-scale=0.5"]
    assert verify_folder(run / "merges/average") == []
    assert sweep(recipe, run).done == 0
    (run / "merges/average/thesis.tex").write_text("years of work")
    recipe.write_text(SMALL)
    assert sweep(recipe, run).done == 2  # the store has no scores without models
    assert (run / "merges/average/thesis.tex").read_text() == "years of work"  # models are never removed


def test_without_base_and_references(berts: Path, tmp_path: Path) -> None:
    text = SWEPT_PLAIN.replace("base: base\n", "").replace("  device", "  references: false\n  device")
    recipe = lay_out(berts, tmp_path, text + "sweep: {methods: [average, slerp], aligners: [none], choose: test}\n")
    for path in (tmp_path / "base").iterdir():
        if path.name not in ("config.json", "model.safetensors"):  # what reads the inputs, else the base's
            shutil.copy(path, tmp_path / "two")
    sweep(recipe, tmp_path / "run")
    assert {record.method for record in read_records(tmp_path / "run" / "records.jsonl")} == {"average", "slerp"}
    assert "| current | val |" not in (tmp_path / "run" / "sweep.md").read_text()
    assert read_records(tmp_path / "run" / "validation.jsonl") == []


def test_fits(berts: Path, tmp_path: Path) -> None:
    fit = "fit: {data: {two: two.csv, three: three.csv}, device: cpu, limit: 20}\n"
    methods = "sweep: {methods: [{method: realign, parameters: {steps: 2}}, average], aligners: [none]}\n"
    swept = sweep(lay_out(berts, tmp_path, SWEPT_PLAIN + fit + methods), tmp_path / "run")
    best = {best.budget: best.hindsight.variant.name for best in swept.best}
    assert list(best.items()) == [("the fit's inputs", "realign steps=2"), ("no inputs", "average")]


def test_a_folder_that_is_another_s(berts: Path, tmp_path: Path) -> None:
    recipe = lay_out(berts, tmp_path, SWEPT_PLAIN)
    orthomerge.run(recipe, out=tmp_path / "run")
    recipe.write_text(SMALL)
    before = contents(tmp_path / "run")
    for force in (False, True):
        with pytest.raises(OutputError, match="holds a run, not a sweep; give another folder"):
            sweep(recipe, tmp_path / "run", force=force)
    assert contents(tmp_path / "run") == before
