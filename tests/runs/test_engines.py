"""Every engine makes the same results, and workers that die or fail end a run in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.runs.making import lay_out, outcome

import orthomerge
from orthomerge.core.errors import OutputError, RecipeError
from orthomerge.data.reading import ColumnSource, read_task
from orthomerge.runs import driver
from orthomerge.runs.driver import Artifact, ArtifactError, Serial, drive, engine_of
from orthomerge.runs.recipe import Recipe
from orthomerge.runs.sections import Evaluate
from orthomerge.runs.work import Work, source_digest

SOURCE = Path(orthomerge.__file__).parents[1]
RECIPE = """\
base: base
experts: {two: two, three: three}
evaluate: {data: {two: two.csv}, references: false, device: cpu}
sweep: {methods: [average, task_arithmetic], scales: [0.5], aligners: [none], choose: test, keep: true}
report: false
"""
PARSL = f"""
from parsl import Config, HighThroughputExecutor
from parsl.concurrent import ParslPoolExecutor
from parsl.providers import LocalProvider


def executor():
    provider = LocalProvider(init_blocks=1, max_blocks=1, worker_init="export PYTHONPATH={SOURCE}")
    site = HighThroughputExecutor(address="127.0.0.1", max_workers_per_node=1, provider=provider, encrypted=False)
    return ParslPoolExecutor(Config(executors=[site], run_dir="RUN_DIR", retries=1))
"""


def results(run: Path) -> dict[str, object]:
    """Every number of a sweep, and the weights that it kept."""
    weights = {path.relative_to(run): path.read_bytes() for path in (run / "merges").rglob("*.safetensors")}
    assert len(weights) == 2 * 5
    return {**outcome(run), **{str(name): data for name, data in weights.items()}}


def test_every_engine_makes_the_same(berts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, in processes, on Ray, and through Parsl, which runs in a process of its own, for it closes no files."""
    parsl = pytest.importorskip("parsl")
    pytest.importorskip("ray")
    recipe = lay_out(berts, tmp_path, RECIPE)
    (tmp_path / "site").mkdir()
    (tmp_path / "site/cluster.py").write_text(PARSL.replace("RUN_DIR", str(tmp_path / "parsl")))
    search = {
        "PYTHONPATH": os.pathsep.join((str(tmp_path / "site"), str(SOURCE))),
        "PATH": os.pathsep.join((str(Path(parsl.__file__).parents[4] / "bin"), os.environ["PATH"])),
    }
    words = f"{sys.executable} -m orthomerge run {recipe} --out cluster --on cluster:executor".split()
    how: Any = {"cwd": tmp_path, "env": {**os.environ, **search}, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **how) as cluster:
        orthomerge.run(recipe, out=tmp_path / "alone")
        monkeypatch.chdir(tmp_path)
        for name in ("random", "torch", "socket", "orthomerge"):  # nothing is imported from the working directory
            (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\nraise SystemExit(3)\n")
        for on in ("process:2", "ray:1"):
            assert set(orthomerge.run(recipe, out=on, on=on).stages.values()) == {"done"}
            assert results(tmp_path / on) == results(tmp_path / "alone")
        with ThreadPoolExecutor(1) as executor:
            orthomerge.run(recipe, out="threads", on=executor)
            assert executor.submit(int).result() == 0  # it is not ours to shut down
        assert results(tmp_path / "threads") == results(tmp_path / "alone")
        errors = cluster.communicate(timeout=300)[1]
    assert (cluster.returncode, "Traceback" in errors) == (0, False), errors
    assert results(tmp_path / "cluster") == results(tmp_path / "alone")
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    ("on", "message"),
    [
        ("proces", "'on' must be serial, process, process:N, ray, ray:N or module:function, got 'proces'"),
        ("process:0", "'on' must be"),
        ("ray:many", "'on' must be"),
        ("nowhere:executor", "cannot import 'executor' of 'nowhere'"),
        ("os.path:executor", "cannot import 'executor' of 'os.path'"),
        ("os:sep", "os:sep must be a function that returns an Executor, got str"),
        ("here:executor", "the module must be installed or on PYTHONPATH"),
    ],
)
def test_engines_that_do_not_exist(on: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    with pytest.raises(RecipeError, match=message):
        engine_of(on)


def test_data_that_stays_here(berts: Path, tmp_path: Path) -> None:
    lay_out(berts, tmp_path)
    named, *others = (ColumnSource(str(tmp_path / "two.csv"), "text", column) for column in ("label", "text"))
    for source in (read_task(tmp_path / "two.csv"), named):
        section = Evaluate({"two": source})  # type: ignore[dict-item]
        recipe = Recipe({"two": str(tmp_path / "two")}, base=str(tmp_path / "base"), method="average", evaluate=section)
        with pytest.raises(RecipeError, match="data in memory cannot be given to other processes"):
            orthomerge.run(recipe, out=tmp_path / "run", on="process:2")
    assert len({source_digest(source) for source in (named, *others, str(named))}) == 3


# The driver alone: artifacts of these tests, made by processes


def make(place: Path, work: Work, *needs: str, log: str, once: str = "", error: str = "") -> None:
    """Write one line to a log; die if no worker has died at `once` yet; fail with `error`."""
    if once and not Path(once).exists():
        Path(once).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if error:
        raise RecipeError(error)
    with Path(log).open("a") as file:
        file.write("made\n")
    (place / "value").write_text("42")


def die(place: Path, work: Work) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(Recipe({"a": "a"}), "", tmp_path / "run", 1)


def diamond(tmp_path: Path, **options: str) -> Iterator[Artifact]:
    log = {"log": str(tmp_path / "log")}
    first, left, right, last = (letter * 64 for letter in "abcd")
    yield Artifact(first, "first", make, (), log)
    yield Artifact(left, "left", make, (first,), {**log, **options})
    yield Artifact(right, "right", make, (first,), log)
    yield Artifact(last, "last", make, (left, right), log)


def test_workers_that_die(work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts = list(diamond(tmp_path, once=str(tmp_path / "died")))
    made = [done.artifact.name for done in drive(artifacts, work, engine_of("process:2"))]
    assert (made[0], sorted(made[1:3]), made[3]) == ("first", ["left", "right"], "last")
    assert (tmp_path / "log").read_text() == "made\n" * 4

    def refuse() -> Executor:
        raise AssertionError("everything is there")

    assert [done.found for done in drive(artifacts, work, engine_of(refuse))] == [True] * 4
    monkeypatch.setattr(driver, "_MOST_BREAKS", 0)
    with pytest.raises(OutputError, match="workers died 1 times"):
        list(drive([Artifact("e" * 64, "fifth", die)], work, engine_of("process:1")))


@pytest.mark.parametrize("on", ["serial", "process:2"])
def test_the_first_error_ends_the_run(work: Work, tmp_path: Path, on: str) -> None:
    artifacts = list(diamond(tmp_path, error="no such thing"))
    with pytest.raises(ArtifactError, match="no such thing") as caught:
        list(drive(artifacts, work, engine_of(on)))
    assert caught.value.artifact.name == "left"
    assert isinstance(caught.value.error, RecipeError)
    assert work.store.get("d" * 64) is None


def test_nothing_is_awaited_that_was_cancelled(work: Work, tmp_path: Path) -> None:
    class Silent(Serial):
        """Never answers for one artifact, nor that it was cancelled, as Ray does not."""

        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            return Future() if args[1].name == "silent" else super().submit(fn, *args, **kwargs)

    failing = Artifact("b" * 64, "failing", make, (), {"log": str(tmp_path / "log"), "error": "no such thing"})
    with pytest.raises(ArtifactError, match="no such thing"):
        list(drive([Artifact("a" * 64, "silent", make), failing], work, engine_of(Silent)))
