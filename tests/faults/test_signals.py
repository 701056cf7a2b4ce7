"""Ctrl-C, a signal, a second run, a full or read-only disk, memory that runs out: in order, whatever happens.

Signals and kills at every single call of a merge, an align and a fit are in test_crash_points.py.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.berts import contents
from tests.faults.injection import Injector, memory_folder
from tests.faults.tiny import commands, evaluation, recipe_for

from orthomerge.cli import app
from orthomerge.core.errors import OrthomergeError, OutputError
from orthomerge.evaluation.scores import read_run
from orthomerge.merging.elements import TaskArithmetic
from orthomerge.models.saved import verify_folder
from orthomerge.runs.models import write
from orthomerge.runs.recipe import Recipe

Start = Callable[..., "subprocess.Popen[str]"]
ROOT = Path(__file__).resolve().parents[2]
ALL = os.environ.get("CRASH_POINTS") == "all"


@pytest.fixture
def recipe(experts: Path) -> Recipe:
    return recipe_for(experts, "task_arithmetic")


def test_an_evaluation_that_is_interrupted(injected: Injector, experts: Path, merged: Path) -> None:
    """An interrupted run leaves nothing; a run that was there before can still be read, or says what to do."""
    words = [*evaluation(experts, merged), "--out", str(injected.root / "run")]
    for older in (False, True):
        root = injected.reset()
        calls = injected.run(words).calls
        before = contents(root / "run")
        for k in range(1, len(calls) + 1, 1 if ALL else 40):
            if not older:
                shutil.rmtree(root / "run", ignore_errors=True)
            number = (signal.SIGINT, signal.SIGTERM)[k % 2]
            ran = injected.run(words, what="signal", k=k, code=number)
            if ran.code:
                assert ran.code == 128 + number, (k, ran.err)
                assert ran.err.splitlines()[-1].startswith("orthomerge: interrupted; "), ran.err
            assert not list(root.rglob("*.partial")), k
            if (root / "run" / "notes.json").exists():
                assert read_run(root / "run").records
            elif ran.code and not (root / "run" / "records.jsonl").exists():
                assert not (root / "run").exists(), (k, contents(root / "run").keys())
            assert injected.run(words).code == 0
            assert contents(root / "run").keys() == before.keys()


def used(process: int) -> float:
    """CPU seconds of a process: how far it has come, however busy the machine is."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


MOMENTS = [(name, number) for name in ("merge", "align", "fit") for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize(("name", "number"), MOMENTS if ALL else MOMENTS[::3])
def test_a_signal_at_a_random_moment(name: str, number: int, experts: Path, merged: Path, start: Start) -> None:
    """In a process of its own: also while libraries are being imported."""
    with memory_folder() as folder:
        place = folder / "place"
        place.mkdir()
        words = [*commands(experts, merged)[name], "--out", str(place / "out")]
        for draw in range(3 if ALL else 1):
            process = start(words)
            moment = 0.3 + 2 * random.Random(f"{name} {number} {draw}").random()
            while process.poll() is None and used(process.pid) < moment:
                time.sleep(0.01)
            process.send_signal(number)
            process.send_signal(number)  # whoever is impatient presses twice
            _, error = process.communicate(timeout=120)
            complete = (place / "out").exists()
            # The interpreter itself may still be starting, or ending.
            assert process.returncode in (128 + number, -number, *([0] if complete else [])), error
            assert [path.name for path in place.iterdir()] == (["out"] if complete else [])
            assert not complete or not verify_folder(place / "out")
            if process.returncode == 128 + number:
                assert "Traceback" not in error
                assert "interrupted; nothing half-written was left behind" in error
            shutil.rmtree(place / "out", ignore_errors=True)


def test_a_second_signal_at_once_does_not_disturb_the_clearing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    app._handle_signals()
    with pytest.raises(SystemExit, match="143"):
        handlers[signal.SIGTERM](signal.SIGTERM, None)
    handlers[signal.SIGINT](signal.SIGINT, None)
    monkeypatch.setattr(app, "_PATIENCE", 0.0)
    with pytest.raises(SystemExit, match="130"):
        handlers[signal.SIGINT](signal.SIGINT, None)


@pytest.mark.parametrize("force", [False, True])
def test_many_runs_into_one_output(recipe: Recipe, tmp_path: Path, force: bool) -> None:
    """One at a time; the others are refused. What is there in the end is whole."""
    out = tmp_path / "place" / "out"
    if force:
        write(recipe, out=out)

    def run(number: int) -> str:
        try:
            write(recipe, out=out, force=force)
        except OutputError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(4) as pool:
        messages = list(pool.map(run, range(12)))
    assert messages.count("") >= 1 if force else messages.count("") == 1
    assert all("another run is writing" in each or "exists already" in each for each in messages if each)
    assert not verify_folder(out)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


PROGRAM = """
import subprocess, sys
from pathlib import Path
from orthomerge.files import publish
from orthomerge.cli.app import main
place, words = Path(sys.argv[1]), sys.argv[2:]
def attempt(out):
    sys.argv = ["orthomerge", *words, "--out", str(place / out)]
    try:
        main()
    except SystemExit as end:
        print(f"{out} {end.code} {sorted(path.name for path in place.iterdir())}", flush=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "none", str(place)], check=True)
attempt("early")
publish.check_room = lambda folder, need: None  # as if somebody else filled the disk meanwhile
attempt("full")
subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
attempt("readonly")
"""


def test_a_disk_that_is_full_or_read_only_for_real(experts: Path, tmp_path: Path) -> None:
    """A file system of 40 kB in a namespace of its own; permissions would not stop root."""
    if subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("may not make a mount namespace here; RLIMIT_FSIZE and injected errors are tested elsewhere")
    command = ["unshare", "-m", sys.executable, "-c", PROGRAM, str(tmp_path), *commands(experts, tmp_path)["merge"]]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ended.stdout.splitlines() == ["early 5 []", "full 5 []", "readonly 5 []"], ended.stderr
    early, full, readonly = ended.stderr.splitlines()
    assert "has 0.00 GB free, but the output needs 0.02 GB; make room, or write elsewhere" in early
    assert f"cannot write {tmp_path / 'full'}: No space left on device; nothing was left behind" in full
    assert f"cannot write to {tmp_path}: Read-only file system" in readonly


@pytest.mark.parametrize("often", [False, True])
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_memory_that_runs_out(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, often: bool
) -> None:
    """Smaller blocks are tried once, and give the same bytes; then it is an error, and nothing is left."""
    expected = contents(write(recipe, out=tmp_path / "expected"))
    original, calls = TaskArithmetic.merge, list[bool]()

    def merge(self: TaskArithmetic, base: torch.Tensor, deltas: torch.Tensor, **more: Any) -> torch.Tensor:
        calls.append(often)
        if often or len(calls) == 1:
            raise error
        return original(self, base, deltas, **more)

    monkeypatch.setattr(TaskArithmetic, "merge", merge)
    if not often:
        assert contents(write(recipe, out=tmp_path / "out")) == expected
        return
    with pytest.raises(OrthomergeError, match="ran out of memory with a merge of 2 experts; close other programs"):
        write(recipe, out=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["expected"]


SOAK = """
import sys
from pathlib import Path
from benchmarks.soak import load, soak
place = Path(sys.argv[1])
result = soak(place / "soak", 10)
assert not result.wrong and not result.left, (result.wrong, result.left)
assert result.descriptors[1] == result.descriptors[-1], result.descriptors
assert result.growth < 256 * 1024, result.resident
wrong, weights, records, seconds = load(place / "load", 4, processes=2)
assert not wrong and len(weights) == len(records) == 1, wrong
"""


def test_merges_in_a_row_and_jobs_at_once(tmp_path: Path) -> None:
    """In a process of its own, which may fork before any thread has started; `make soak` does more of it."""
    for name in ("soak", "load"):
        (tmp_path / name).mkdir()
    program = [sys.executable, "-c", SOAK, str(tmp_path)]
    ended = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
