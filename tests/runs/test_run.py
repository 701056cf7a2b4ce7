"""`orthomerge.run`: all stages, found again, continued, redone where something changed, failing with a way out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.berts import contents
from tests.runs.making import BARE, PLAIN, RECIPE, KillAt, Killed, lay_out

import orthomerge
from orthomerge.analysis.diagnosis import read_diagnosis
from orthomerge.core.errors import CheckpointError, IncompatibleError, OrthomergeError, OutputError, RecipeError
from orthomerge.data.reading import read_task
from orthomerge.evaluation.records import read_info, read_records
from orthomerge.models.saved import verify_folder
from orthomerge.runs.models import plan, write
from orthomerge.runs.recipe import Recipe, read_recipe
from orthomerge.runs.run import Ran, run
from orthomerge.runs.sections import Evaluate

WITHOUT_REPORT = RECIPE.replace("report: {title: Two words}", "report: false")
STAGES = ["merge", "align", "evaluate", "diagnose", "report"]


@pytest.fixture(scope="module")
def first(berts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    """A recipe and its run, which tests must leave as they are."""
    recipe = lay_out(berts, tmp_path_factory.mktemp("line"))
    return recipe, run(recipe, out=recipe.parent / "run", command="orthomerge run recipe.yaml")


def copied(first: tuple[Path, Ran], folder: Path) -> Path:
    """The recipe of a copy of everything, in another place."""
    shutil.copytree(first[0].parent, folder, dirs_exist_ok=True)
    return folder / "recipe.yaml"


def done(ran: Ran) -> list[str]:
    return [name for name, state in ran.stages.items() if state == "done"]


def test_a_whole_run(first: tuple[Path, Ran], tmp_path: Path) -> None:
    ran, folder = first[1], first[1].folder
    assert done(ran) == STAGES == list(ran.seconds)
    assert (ran.out, ran.page) == (folder / "models/task_arithmetic-ridge", folder / "report.html")
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == {
        "comparisons.json", "diagnosis.json", "models", "notes.json", "orthomerge-run.json", "predictions",
        "records.jsonl", "report.html", "report_files", "run.json", "table.md",
    }  # fmt: skip
    models = {path.name for path in (folder / "models").iterdir()}
    assert models == {"task_arithmetic", "task_arithmetic-ridge"}  # base and experts are read where they are
    assert [verify_folder(folder / "models" / name) for name in models] == [[]] * 2
    methods = {record.method for record in read_records(folder / "records.jsonl")}
    assert methods == {"base", "expert", "task_arithmetic", "task_arithmetic + ridge"}
    assert read_diagnosis(folder / "diagnosis.json").method == "task_arithmetic"
    page = (folder / "report.html").read_text()
    for text in ("<title>Two words", "experts: {two: two, three: three}", "orthomerge run recipe.yaml"):
        assert text in page
    info = read_info(folder / "run.json")
    assert (info.command, info.recipe, list(info.seconds)) == ("orthomerge run recipe.yaml", RECIPE, STAGES[:-1])
    assert (info.memory or 0) > 1 << 26
    assert {"orthomerge", "python", "torch", "transformers"} <= info.versions.keys()
    assert "cores" in info.machine
    assert info.manifests == ("models/task_arithmetic", "models/task_arithmetic-ridge")


def test_a_second_run_does_nothing(first: tuple[Path, Ran], tmp_path: Path) -> None:
    recipe, ran = first
    before = {path: path.stat().st_mtime_ns for path in ran.folder.rglob("*") if path.is_file()}
    again = orthomerge.run(str(recipe), out=recipe.parent / "run")
    assert done(again) == []
    assert before == {path: path.stat().st_mtime_ns for path in ran.folder.rglob("*") if path.is_file()}
    assert again.seconds == ran.seconds
    moved = copied(first, tmp_path)
    assert done(run(moved, out=tmp_path / "run")) == []


def test_a_killed_run_goes_on(first: tuple[Path, Ran], berts: Path, tmp_path: Path) -> None:
    recipe = lay_out(berts, tmp_path)
    for stage in ("align", "diagnose"):
        with pytest.raises(Killed):
            run(recipe, out=tmp_path / "run", watch=KillAt(stage))
    recipe.write_text(WITHOUT_REPORT)
    assert done(run(recipe, out=tmp_path / "run")) == ["diagnose"]
    ours, theirs = contents(tmp_path / "run"), contents(first[1].folder)
    same = {"records.jsonl", "comparisons.json", "notes.json", "table.md", "diagnosis.json"}
    assert {name for name in same if ours[name] != theirs[name]} == set()


def test_what_changed_is_done_again(first: tuple[Path, Ran], tmp_path: Path) -> None:
    recipe, run_folder = copied(first, tmp_path), tmp_path / "run"
    recipe.write_text(RECIPE.replace("Two words", "Three words"))
    assert done(run(recipe, out=run_folder)) == ["report"]
    assert "Three words" in (run_folder / "report.html").read_text()
    recipe.write_text(WITHOUT_REPORT.replace("shots: [1, 5]", "shots: 2"))
    assert done(run(recipe, out=run_folder)) == ["evaluate", "diagnose"]
    records = read_records(run_folder / "records.jsonl")
    assert {record.shots for record in records} == {None, 2}
    assert len(list((run_folder / "predictions").iterdir())) == len(records)
    recipe.write_text(BARE)  # what the recipe leaves out is removed
    assert done(run(recipe, out=run_folder)) == []
    for name in ("records.jsonl", "diagnosis.json", "report.html", "report_files"):
        assert not (run_folder / name).exists()
    assert (run_folder / "models/task_arithmetic").is_dir()


def test_contents_count_and_not_times_unless_forced(berts: Path, tmp_path: Path) -> None:
    recipe = lay_out(berts, tmp_path, PLAIN)
    run(recipe, out=tmp_path / "run")
    weights, table = tmp_path / "two/model.safetensors", tmp_path / "two.csv"
    for path in (weights, table):
        path.write_bytes(path.read_bytes())
    assert done(run(recipe, out=tmp_path / "run")) == []
    tensors = load_file(weights)
    save_file({**tensors, "classifier.bias": tensors["classifier.bias"] + 1}, weights)
    assert done(run(recipe, out=tmp_path / "run")) == ["merge", "evaluate"]
    table.write_text(table.read_text().replace(",test", ",val", 2))
    assert done(run(recipe, out=tmp_path / "run")) == ["evaluate"]
    before = (tmp_path / "run/records.jsonl").read_bytes()
    assert done(run(recipe, out=tmp_path / "run", force=True)) == ["merge", "evaluate"]
    assert (tmp_path / "run/records.jsonl").read_bytes() == before


def test_what_is_damaged_is_made_again(first: tuple[Path, Ran], tmp_path: Path) -> None:
    recipe = copied(first, tmp_path)
    weights = tmp_path / "run/models/task_arithmetic/encoder.safetensors"
    sound = weights.read_bytes()
    weights.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    (tmp_path / "run/diagnosis.json").unlink()
    assert done(run(recipe, out=tmp_path / "run")) == []  # the store has both
    assert (weights.read_bytes(), (tmp_path / "run/diagnosis.json").is_file()) == (sound, True)
    weights.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))  # the same file as that of the store
    assert done(run(recipe, out=tmp_path / "run")) == ["merge"]
    assert weights.read_bytes() == sound


def test_a_failing_stage_keeps_the_others(berts: Path, tmp_path: Path) -> None:
    recipe = lay_out(berts, tmp_path, PLAIN)
    table = tmp_path / "two.csv"
    sound = table.read_text()
    table.write_text(sound.replace("two-0", "other"))
    with pytest.raises(IncompatibleError, match="stage 2 of 2, 'evaluate', failed: the labels of task 'two'") as caught:
        run(recipe, out=tmp_path / "run")
    assert f"Earlier stages are kept in {tmp_path / 'run'}: merge." in str(caught.value)
    assert "run the same command again; it continues with 'evaluate'" in str(caught.value)
    assert verify_folder(tmp_path / "run/models/task_arithmetic") == []
    assert not (tmp_path / "run/records.jsonl").exists()
    table.write_text(sound)
    assert done(run(recipe, out=tmp_path / "run")) == ["evaluate"]


def test_where_the_recipe_says(berts: Path, tmp_path: Path) -> None:
    recipe = lay_out(berts, tmp_path, PLAIN + "out: merged\n")
    ran = run(recipe, out=tmp_path / "run")
    assert ran.out == tmp_path / "merged"
    assert read_info(tmp_path / "run/run.json").manifests == ("../merged",)
    recipe.write_text(PLAIN.replace("scale: 0.5", "scale: 0.25") + "out: merged\n")
    assert done(run(recipe, out=tmp_path / "run"))[0] == "merge"  # the run's own, so it may be replaced
    assert json.loads((tmp_path / "merged/orthomerge.json").read_text())["method"]["parameters"] == {"scale": 0.25}
    with pytest.raises(OutputError, match="merged exists already; give --force"):
        run(recipe, out=tmp_path / "other")


def test_a_recipe_without_blocks_is_a_merge(berts: Path, tmp_path: Path) -> None:
    ran = run(lay_out(berts, tmp_path, BARE), out=tmp_path / "run")
    assert (list(ran.stages), ran.page) == (["merge"], None)
    assert read_info(tmp_path / "run/run.json").recipe == BARE
    plain = write(read_recipe(tmp_path / "recipe.yaml"), out=tmp_path / "plain")
    ours, theirs = contents(tmp_path / "run/models/task_arithmetic"), contents(plain)
    del ours["orthomerge.local.json"], theirs["orthomerge.local.json"]  # which say where experts are from there
    assert ours == theirs


def test_a_recipe_in_python(berts: Path, tmp_path: Path) -> None:
    lay_out(berts, tmp_path)
    task = read_task(tmp_path / "two.csv")
    block = Evaluate({"two": task}, protocols=("current",), references=False)  # type: ignore[dict-item]
    experts = {name: str(tmp_path / name) for name in ("two", "three")}
    recipe = Recipe(experts, base=str(tmp_path / "base"), evaluate=block, diagnose=False, report=False)
    with pytest.raises(RecipeError, match="needs a run folder"):
        run(recipe)
    ran = run(recipe, out=tmp_path / "run")
    assert {record.method for record in read_records(ran.folder / "records.jsonl")} == {"task_arithmetic"}
    assert "a Task in memory" in read_info(ran.folder / "run.json").recipe
    assert done(run(recipe, out=tmp_path / "run")) == []


def test_places_that_are_not_ours_and_recipes_with_problems(berts: Path, tmp_path: Path) -> None:
    recipe = lay_out(berts, tmp_path, PLAIN)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/records.jsonl").write_text("precious")
    (tmp_path / "file").touch()
    for name, message in (("run", r"not made by `orthomerge run` \(it has no .store\)"), ("file", "cannot write the")):
        with pytest.raises(OutputError, match=message):
            run(recipe, out=tmp_path / name)
    # Problems are found before any work.
    text = RECIPE.replace("protocol: knn", "protocol: knm").replace("three: three.csv}\n", "tree: x.csv}\n")
    recipe.write_text(text)
    problems, _ = plan(read_recipe(recipe))
    assert [problem.where for problem in problems] == ["evaluate", *["evaluate: data of 'tree'"] * 2]
    assert "did you mean 'knn'" in str(problems[0])
    refused: list[tuple[str, type[OrthomergeError], str]] = [
        (text, RecipeError, "3 problems"),
        (PLAIN.replace("scale: 0.5", "scale: auto"), RecipeError, "'scale: auto' is chosen by `orthomerge merge"),
        (PLAIN.replace("two: two.csv", "two: gone.csv"), CheckpointError, r"gone\.csv does not exist"),
    ]
    for wrong, kind, message in refused:
        recipe.write_text(wrong)
        with pytest.raises(kind, match=message):
            run(recipe, out=tmp_path / "other")
        assert not (tmp_path / "other").exists()
