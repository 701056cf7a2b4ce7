"""Whole runs in jobs: the same bytes from every executor, from shards, after kills, and as without jobs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest
from tests.running.job_making import CUT, PARTS, done_files, ended, hashes, start, until, worker_at
from tests.running.making import BARE, PLAIN, lay_out
from typer.testing import CliRunner

import orthomerge
from orthomerge.blocks import Evaluate
from orthomerge.cli.app import app
from orthomerge.data.reading import read_task
from orthomerge.errors import (
    CheckpointError,
    IncompatibleError,
    NumericalError,
    OrthomergeError,
    OutputError,
    RecipeError,
)
from orthomerge.recipe import Recipe
from orthomerge.running.jobs.driving import plan_run
from orthomerge.running.jobs.plan import read_plan
from orthomerge.running.jobs.store import Store
from orthomerge.running.jobs.working import parse_shard, work
from orthomerge.running.line import Ran, read_run_recipe

KINDS = {"merge-shard": 4, "assemble": 1, "expert": 2, "solve": 2, "align": 1, "base": 1,
         "evaluate": 20, "finish": 1}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def serial(berts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    """A recipe and its serial run, which tests must leave as they are."""
    folder = tmp_path_factory.mktemp("jobs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORTHOMERGE_CACHE", str(folder / "cache"))
        recipe = lay_out(berts, folder, CUT)
        return recipe, orthomerge.run(recipe, run=folder / "run", on="serial", part=20)


def results(run: Path) -> dict[str, str]:
    """All hashes but those of `finish`, which is a job only where no driver finishes a run.

    A worker that is killed while it writes a file leaves what it had of it, under a name that nobody reads.
    """
    finish = [job.key for job in read_plan(run).of("finish")]
    found = {name: digest for name, digest in hashes(run).items() if not name.startswith(f"jobs/{finish[0]}")}
    return {name: digest for name, digest in found.items() if not name.endswith(".partial")}


def planned(recipe: Path, run: Path) -> Path:
    given, text, folder = read_run_recipe(recipe, run)
    plan_run(given, text, folder, part=20)
    return run


def test_all_kinds_are_there(serial: tuple[Path, Ran]) -> None:
    run = serial[1].folder
    jobs = read_plan(run).jobs
    assert {kind: sum(job.kind == kind for job in jobs) for kind in KINDS} == KINDS
    assert serial[1].stages == dict.fromkeys(("merge", "align", "references", "evaluate", "card"), "done")
    assert serial[1].seconds["align"] > 0.05
    assert orthomerge.verify(serial[1].out) == []


def test_jobs_make_what_a_run_without_them_makes(serial: tuple[Path, Ran], tmp_path: Path) -> None:
    plain = orthomerge.run(serial[0], run=tmp_path / "run")
    ours = {name: found for name, found in hashes(serial[1].folder).items() if not name.startswith("jobs/")}
    assert ours == hashes(plain.folder)


def test_a_run_without_jobs_finds_everything_done(serial: tuple[Path, Ran]) -> None:
    again = orthomerge.run(serial[0], run=serial[1].folder)
    assert set(again.stages.values()) == {"found"}


def test_no_byte_is_there_twice(serial: tuple[Path, Ran]) -> None:
    run = serial[1].folder
    shards = [run / "jobs" / job.key for job in read_plan(run).of("merge-shard")]
    for number, place in enumerate(shards, 1):
        name = f"model-{number:05}-of-00004.safetensors"
        for model in ("task_arithmetic", "task_arithmetic-ridge"):
            assert (run / "models" / model / "encoder" / name).samefile(place / name)


def test_two_processes(serial: tuple[Path, Ran], tmp_path: Path, cache: Path) -> None:
    run = tmp_path / "run"
    ended(start("run", serial[0], "--run", run, "--on", "process:2", *PARTS, cache=cache))
    assert results(run) == results(serial[1].folder)


def test_a_process_that_is_killed_in_the_middle(serial: tuple[Path, Ran], tmp_path: Path, cache: Path) -> None:
    run = tmp_path / "run"
    running = start("run", serial[0], "--run", run, "--on", "process:2", *PARTS, cache=cache)
    victim = until(lambda: worker_at(run))
    os.kill(victim, signal.SIGKILL)
    second = until(lambda: len(done_files(run)) > 5 and worker_at(run, but=[victim]))
    os.kill(second, signal.SIGKILL)
    ended(running)
    assert results(run) == results(serial[1].folder)


def test_two_workers_of_ray(serial: tuple[Path, Ran], tmp_path: Path, cache: Path) -> None:
    pytest.importorskip("ray")
    run = tmp_path / "run"
    running = start("run", serial[0], "--run", run, "--on", "ray:2", *PARTS, cache=cache)
    victim = until(lambda: worker_at(run))
    os.kill(victim, signal.SIGKILL)  # in the middle
    ended(running)
    assert results(run) == results(serial[1].folder)


def test_errors_cross_ray(berts: Path, tmp_path: Path, cache: Path) -> None:
    pytest.importorskip("ray")
    recipe = lay_out(berts, tmp_path, PLAIN)
    (tmp_path / "two.csv").write_text((tmp_path / "two.csv").read_text().replace("two-0", "other"))
    running = start("run", recipe, "--run", tmp_path / "run", "--on", "ray:1", cache=cache)
    said, _ = running.communicate(timeout=240)
    assert running.returncode == IncompatibleError.exit_code, said
    assert "orthomerge: the labels of task 'two'" in said
    assert "Traceback" not in said


def test_four_shards_side_by_side(serial: tuple[Path, Ran], tmp_path: Path, cache: Path) -> None:
    run = tmp_path / "run"
    said = ended(start("run", serial[0], "--run", run, "--plan-only", *PARTS, cache=cache))
    assert "38 jobs: 4 merge-shard, 1 assemble" in said
    workers = [start("work", run, "--shard", f"{number}/4", "--json", cache=cache) for number in range(1, 5)]
    told = [json.loads(ended(worker)[-10_000:].partition("{")[2].join(("{", ""))) for worker in workers]
    assert [len(each["done"]) for each in told] == [10, 10, 9, 9]
    assert told[1]["complete"]  # it has the last job
    assert results(run) == results(serial[1].folder)
    again = orthomerge.run(serial[0], run=run)
    assert set(again.stages.values()) == {"found"}


def test_a_killed_run_goes_on_where_it_was(serial: tuple[Path, Ran], tmp_path: Path, cache: Path) -> None:
    run = tmp_path / "run"
    running = start("run", serial[0], "--run", run, "--on", "serial", *PARTS, cache=cache)
    until(lambda: len(done_files(run)) >= 7)
    os.kill(running.pid, signal.SIGKILL)
    running.communicate()
    before = done_files(run)
    assert 7 <= len(before) < 37
    ended(start("run", serial[0], "--run", run, "--on", "serial", *PARTS, cache=cache))
    after = done_files(run)
    assert {key: after[key] for key in before} == before
    assert len(after) == 37
    assert results(run) == results(serial[1].folder)


def test_only_what_changed_is_done_again(serial: tuple[Path, Ran], tmp_path: Path) -> None:
    shutil.copytree(serial[0].parent, tmp_path / "copy")
    recipe, run = tmp_path / "copy/recipe.yaml", tmp_path / "copy/run"
    before = done_files(run)
    recipe.write_text(CUT.replace("shots: [1, 5]", "shots: 2"))
    orthomerge.run(recipe, run=run, on="serial", part=20)
    after = done_files(run)
    same = [key for key in before if before[key] == after.get(key)]
    assert len(same) == 37 - 20  # all but `evaluate`, and those of the old recipe are gone
    assert len(after) == 37


def test_what_is_damaged_is_made_again(serial: tuple[Path, Ran], tmp_path: Path) -> None:
    shutil.copytree(serial[0].parent, tmp_path / "copy")
    recipe, run = tmp_path / "copy/recipe.yaml", tmp_path / "copy/run"
    shard = next(read_plan(run).of("merge-shard", shard=2)).key
    weights = run / "jobs" / shard / "model-00002-of-00004.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (run / "records.jsonl").unlink()
    orthomerge.run(recipe, run=run, on="serial", part=20)
    assert results(run) == results(serial[1].folder)


@pytest.mark.parametrize("method", ["ties", "breadcrumbs", "dare_ties", "knots", "tsv_m", "slerp"])
def test_shards_are_those_of_a_merge_in_one_go(berts: Path, tmp_path: Path, method: str) -> None:
    text = BARE.replace("task_arithmetic", method).replace("parameters: {scale: 0.5}\n", "")
    recipe = lay_out(berts, tmp_path, text + "max_shard_size: 20KB\n")
    ran = orthomerge.run(recipe, run=tmp_path / "run", on="serial")
    plain = orthomerge.merge(orthomerge.read_recipe(recipe), out=tmp_path / "plain").out
    assert hashes(ran.out) == hashes(plain)
    kinds = [job.kind for job in read_plan(ran.folder).jobs]
    assert ("survey" in kinds) == (method != "tsv_m")
    assert kinds.count("merge-shard") > 3


def test_a_fitted_merge_is_one_job(berts: Path, tmp_path: Path, cache: Path) -> None:
    text = BARE.replace("task_arithmetic", "realign").replace("parameters: {scale: 0.5}", "parameters: {steps: 2}")
    recipe = lay_out(berts, tmp_path, text + "fit: {data: {two: two.csv, three: three.csv}, device: cpu, limit: 20}\n")
    run, plain = tmp_path / "run", tmp_path / "plain"
    ended(start("run", recipe, "--run", run, "--on", "serial", cache=cache))
    ended(start("run", recipe, "--run", plain, cache=cache))
    assert [job.kind for job in read_plan(run).jobs] == ["fit", "finish"]
    assert hashes(run / "models") == hashes(plain / "models")
    assert list(run.glob("jobs/*.fit")) == []


def test_where_the_recipe_says(berts: Path, tmp_path: Path) -> None:
    recipe = lay_out(berts, tmp_path, BARE + "out: merged\n")
    ran = orthomerge.run(recipe, run=tmp_path / "run", on="serial")
    assert ran.out == tmp_path / "merged"
    with pytest.raises(OutputError, match=r"merged exists already; give --force"):
        orthomerge.run(recipe, run=tmp_path / "other", on="serial")
    assert not (tmp_path / "other/jobs").exists()
    again = orthomerge.run(recipe, run=tmp_path / "run", on="serial", force=True)
    assert again.stages == {"merge": "done"}


def test_inputs_that_change_under_the_workers_are_refused(berts: Path, tmp_path: Path) -> None:
    recipe = lay_out(berts, tmp_path, BARE)
    run = planned(recipe, tmp_path / "run")
    weights = tmp_path / "two/model.safetensors"
    weights.write_bytes(weights.read_bytes())
    with pytest.raises(CheckpointError, match=r"two/model.safetensors is not the file that this run was planned with"):
        work(run)
    planned(recipe, run)
    assert work(run).complete


def test_a_task_in_memory_cannot_travel(berts: Path, tmp_path: Path) -> None:
    lay_out(berts, tmp_path)
    block = Evaluate({"two": read_task(tmp_path / "two.csv")}, protocols=("current",))  # type: ignore[dict-item]
    experts = {name: str(tmp_path / name) for name in ("two", "three")}
    recipe = Recipe(experts, base=str(tmp_path / "base"), evaluate=block)
    with pytest.raises(RecipeError, match="the data of 'two' is a Task in memory, which no other process can read"):
        orthomerge.run(recipe, run=tmp_path / "run", on="process")


def test_parts_must_have_inputs(berts: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="at least 1 input, got 0"):
        orthomerge.run(lay_out(berts, tmp_path, BARE), run=tmp_path / "run", on="serial", part=0)


def test_shards_are_told() -> None:
    assert parse_shard("2/4") == (2, 4)
    for wrong in ("0/4", "5/4", "4", "a/b", "1/"):
        with pytest.raises(RecipeError, match="a shard is i/N with i from 1 to N"):
            parse_shard(wrong)


def test_a_worker_whose_others_never_come(berts: Path, tmp_path: Path) -> None:
    recipe = lay_out(berts, tmp_path, BARE + "max_shard_size: 30KB\n")
    run, said = planned(recipe, tmp_path / "run"), list[str]()
    message = (
        r"nothing new for 3 s; this worker waits for the job 'merge-shard 2 4' .* of shard 2/2, which nobody is at"
    )
    with pytest.raises(OrthomergeError, match=message):
        work(run, shard=(1, 2), patience=3, say=said.append)
    assert "waiting for the job 'merge-shard 2 4'" in said[0]
    assert len(done_files(run)) == 2  # shards 1 and 3; 5 is `assemble`
    worked = work(run, shard=(1, 2), steal=True, patience=3)
    assert (len(worked.done), worked.found, worked.complete) == (4, 2, True)
    assert work(run).done == []


def test_a_worker_hears_that_another_failed(berts: Path, tmp_path: Path) -> None:
    recipe = lay_out(berts, tmp_path, BARE + "max_shard_size: 30KB\n")
    run = planned(recipe, tmp_path / "run")
    key = read_plan(run).jobs[1].key
    store = Store(run)
    store.folder.mkdir()
    store.fail(key, ("NumericalError", "of an earlier day"))
    os.utime(store.folder / f"{key}.failed", (0, 0))

    def fail_now(text: str) -> None:
        store.fail(key, ("NumericalError", "'a' holds NaN; find a sound checkpoint"))

    with pytest.raises(NumericalError, match=r"^'a' holds NaN; find a sound checkpoint$"):
        work(run, shard=(1, 2), patience=20, say=fail_now)
    assert work(run, shard=(2, 2), steal=True).complete
    assert list(store.folder.glob("*.failed")) == []


def test_a_worker_takes_what_nobody_is_at(berts: Path, tmp_path: Path) -> None:
    recipe = lay_out(berts, tmp_path, BARE + "max_shard_size: 30KB\n")
    run = planned(recipe, tmp_path / "run")
    store = Store(run)
    store.folder.mkdir()
    key = read_plan(run).jobs[0].key
    (store.folder / f"{key}.lease").write_text(json.dumps(["elsewhere", 1]))
    with pytest.raises(OrthomergeError, match=r"waits for the job 'merge-shard 1 4' .*process 1 on elsewhere is at"):
        work(run, patience=1)
    assert len(done_files(run)) == 3
    (store.folder / f"{key}.lease").write_text(json.dumps([socket.gethostname(), 999_999_999]))
    assert work(run).complete


def test_nothing_is_fetched(berts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> None:
        raise AssertionError("the network was asked for")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert orthomerge.run(lay_out(berts, tmp_path, BARE), run=tmp_path / "run", on="serial").out.is_dir()


def test_the_command_line(berts: Path, tmp_path: Path) -> None:
    recipe, run = lay_out(berts, tmp_path, BARE), tmp_path / "run"
    typed = CliRunner()
    assert isinstance(typed.invoke(app, ["run", str(recipe), "--on", "slurm"]).exception, RecipeError)
    assert isinstance(typed.invoke(app, ["work", str(run)]).exception, CheckpointError)
    planned = typed.invoke(app, ["run", str(recipe), "--run", str(run), "--plan-only", "--json"])
    assert json.loads(planned.stdout)["jobs"] == {"merge-shard": 1, "assemble": 1, "finish": 1}
    worked = typed.invoke(app, ["work", str(run), "--quiet"])
    assert "3 jobs done, 0 found done\nthe run is complete" in worked.stdout
    again = typed.invoke(app, ["work", str(run), "--shard", "1/2", "--json"])
    assert json.loads(again.stdout) == {"run": str(run), "done": [], "found": 3, "complete": True}
