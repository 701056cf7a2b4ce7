"""Every engine makes the same results, and workers that die or fail end a run in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.runs.making import lay_out
from tests.runs.sweep_making import SMALL, outcome

import orthomerge
from orthomerge.core.errors import OutputError, RecipeError
from orthomerge.data.reading import read_task
from orthomerge.runs import driver
from orthomerge.runs.driver import Artifact, ArtifactError, Silent, drive
from orthomerge.runs.engines import engine_of
from orthomerge.runs.recipe import Recipe
from orthomerge.runs.sections import Evaluate
from orthomerge.runs.work import Work

ROOT = Path(__file__).parents[2]
KEPT = SMALL.replace("[none]}", "[none], keep: true}")
PARSL = f"""
from parsl import Config, HighThroughputExecutor
from parsl.concurrent import ParslPoolExecutor
from parsl.providers import LocalProvider


def executor():
    start = "export PYTHONPATH={ROOT / "src"}"
    provider = LocalProvider(init_blocks=1, max_blocks=1, worker_init=start)
    site = HighThroughputExecutor(address="127.0.0.1", max_workers_per_node=2, provider=provider, encrypted=False)
    return ParslPoolExecutor(Config(executors=[site], run_dir="RUN_DIR", retries=1))
"""


def results(run: Path) -> dict[str, object]:
    """Every number of a sweep, and the weights that it kept."""
    weights = {path.relative_to(run): path.read_bytes() for path in (run / "merges").rglob("*.safetensors")}
    assert len(weights) == 2 * 5
    return {**outcome(run), **{str(name): data for name, data in weights.items()}}


@pytest.fixture(scope="module")
def alone(berts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, and beside it the run without other processes."""
    recipe = lay_out(berts, tmp_path_factory.mktemp("alone"), KEPT)
    orthomerge.run(recipe, out=recipe.parent / "alone")
    return recipe


def test_processes(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("random", "torch", "socket", "orthomerge"):  # nothing is imported from where somebody stands
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\nraise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    ran = orthomerge.run(alone, out="run", on="process:2")
    assert set(ran.stages.values()) == {"done"}
    assert results(tmp_path / "run") == results(alone.parent / "alone")
    assert not (tmp_path / "imported").exists()


def test_ray(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    (tmp_path / "torch.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    orthomerge.run(alone, out="run", on="ray:2")
    assert results(tmp_path / "run") == results(alone.parent / "alone")


def test_parsl(alone: Path, tmp_path: Path) -> None:
    """In a process of its own, for Parsl does not close its files."""
    parsl = pytest.importorskip("parsl")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/cluster.py").write_text(PARSL.replace("RUN_DIR", str(tmp_path / "parsl")))
    scripts = Path(parsl.__file__).parents[4] / "bin"
    places = {"PYTHONPATH": str(tmp_path / "site"), "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    words = [sys.executable, "-m", "orthomerge.cli.app", "run", str(alone), "--out", "run", "--on", "cluster:executor"]
    done = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, **places}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert results(tmp_path / "run") == results(alone.parent / "alone")


def test_an_executor_of_python(alone: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as executor:
        orthomerge.run(alone, out=tmp_path / "run", on=executor)
        assert executor.submit(int).result() == 0  # it is not ours to shut down
    assert results(tmp_path / "run") == results(alone.parent / "alone")


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


def test_data_in_memory_stays_here(berts: Path, tmp_path: Path) -> None:
    lay_out(berts, tmp_path)
    block = Evaluate({"two": read_task(tmp_path / "two.csv")})  # type: ignore[dict-item]
    recipe = Recipe({"two": str(tmp_path / "two")}, base=str(tmp_path / "base"), method="average", evaluate=block)
    with pytest.raises(RecipeError, match="data in memory cannot be given to other processes"):
        orthomerge.run(recipe, out=tmp_path / "run", on="process:2")


# The driver alone: artifacts of these tests, made by processes


def make(place: Path, work: Work, *, log: str, once: str = "", error: str = "") -> None:
    """Write one line to a log; die if nobody has died at `once` yet; fail with `error`."""
    if once and not Path(once).exists():
        Path(once).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if error:
        raise RecipeError(error)
    with Path(log).open("a") as file:
        file.write("made\n")
    (place / "value").write_text("42")


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(Recipe({"a": "a"}), "", tmp_path / "run", 1)


def key(letter: str) -> str:
    return letter * 64


def diamond(tmp_path: Path, **options: str) -> Iterator[Artifact]:
    log = {"log": str(tmp_path / "log")}
    yield Artifact(key("a"), "first", "files", make, (), log)
    yield Artifact(key("b"), "left", "files", make, (key("a"),), {**log, **options})
    yield Artifact(key("c"), "right", "files", make, (key("a"),), log)
    yield Artifact(key("d"), "last", "files", make, (key("b"), key("c")), log)


def test_a_worker_that_dies_once(work: Work, tmp_path: Path) -> None:
    artifacts = list(diamond(tmp_path, once=str(tmp_path / "died")))
    made = [done.artifact.name for done in drive(artifacts, work, engine_of("process:2"), Silent())]
    assert (made[0], sorted(made[1:3]), made[3]) == ("first", ["left", "right"], "last")
    assert (tmp_path / "log").read_text() == "made\n" * 4
    again = [done.found for done in drive(artifacts, work, engine_of("process:2"), Silent())]
    assert again == [True] * 4


def test_workers_that_always_die(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_MOST_BREAKS", 1)
    artifacts = [Artifact(key("a"), "first", "files", die)]
    with pytest.raises(OutputError, match="workers died 2 times"):
        list(drive(artifacts, work, engine_of("process:1"), Silent()))


def die(place: Path, work: Work) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("on", ["serial", "process:2"])
def test_the_first_error_ends_the_run(work: Work, tmp_path: Path, on: str) -> None:
    artifacts = list(diamond(tmp_path, error="no such thing"))
    with pytest.raises(ArtifactError, match="no such thing") as caught:
        list(drive(artifacts, work, engine_of(on), Silent()))
    assert caught.value.artifact.name == "left"
    assert isinstance(caught.value.error, RecipeError)
    assert work.store.get(key("d")) is None


def test_an_executor_is_started_only_for_work(work: Work, tmp_path: Path) -> None:
    artifacts = list(diamond(tmp_path))
    list(drive(artifacts, work, engine_of("serial"), Silent()))

    def refuse() -> Executor:
        raise AssertionError("everything is there")

    assert len(list(drive(artifacts, work, engine_of(refuse), Silent()))) == 4
