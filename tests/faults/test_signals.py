"""Ctrl-C, a signal, a kill, a second run, a full or read-only disk, memory that runs out: in order, whatever happens.

Signals and kills at every single call of a merge, an align and a fit are in test_crash_points.py.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.berts import contents
from tests.faults.injection import Injector, memory_folder
from tests.faults.tiny import commands, evaluation, recipe_for

from orthomerge.cli import app
from orthomerge.core.errors import OrthomergeError, OutputError
from orthomerge.evaluation.scores import read_run
from orthomerge.merging.elements import TaskArithmetic
from orthomerge.models.saved import verify_folder
from orthomerge.runs.models import write
from orthomerge.runs.recipe import Recipe, read_recipe

Start = Callable[..., "subprocess.Popen[str]"]
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
            time.sleep(0.3 + 2 * random.Random(f"{name} {number} {draw}").random())
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
    messages: list[str] = []

    def run() -> None:
        for _ in range(3):
            try:
                write(recipe, out=out, force=force)
                messages.append("")
            except OutputError as error:
                messages.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert messages.count("") >= 1 if force else messages.count("") == 1
    assert all("another run is writing" in each or "exists already" in each for each in messages if each)
    assert not verify_folder(out)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


PROGRAM = """
import sys
from pathlib import Path
from orthomerge.files import publish
from orthomerge.cli.app import main
import subprocess
place = Path(sys.argv[1])
def attempt(out):
    sys.argv = ["orthomerge", *WORDS, "--out", str(place / out)]
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
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("may not make a mount namespace here; RLIMIT_FSIZE and injected errors are tested elsewhere")
    words = [word for word in commands(experts, tmp_path)["merge"] if word != "--quiet"]
    program = f"WORDS = {[*words, '--quiet']!r}\n{PROGRAM}"
    ended = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.stdout.splitlines() == ["early 5 []", "full 5 []", "readonly 5 []"], ended.stderr
    early, full, readonly = ended.stderr.splitlines()
    assert "has 0.00 GB free, but the output needs 0.02 GB; make room, or write elsewhere" in early
    assert f"cannot write {tmp_path / 'full'}: No space left on device; nothing was left behind" in full
    assert f"cannot write to {tmp_path}: Read-only file system" in readonly


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_memory_that_runs_out(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It is an error with advice, and nothing is left."""

    def merge(self: TaskArithmetic, base: torch.Tensor, deltas: torch.Tensor, **more: Any) -> torch.Tensor:
        raise error

    monkeypatch.setattr(TaskArithmetic, "merge", merge)
    with pytest.raises(OrthomergeError, match="ran out of memory with a merge of 2 experts; close other programs"):
        write(recipe, out=tmp_path / "out")
    assert not any(tmp_path.iterdir())


ROWS, COLUMNS, TENSORS = 600, 600, 12  # 17 MB in float32
LARGE = """
base: base.safetensors
experts:
  a: {path: a.safetensors, head: {layers: [fc]}}
  b: {path: b.safetensors, head: {layers: [fc]}}
family: generic
encoder_prefix: body
method: ties
max_shard_size: 6MB
out: out
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe for a model that takes a moment to merge."""
    folder = tmp_path_factory.mktemp("large")
    generator = torch.Generator().manual_seed(0)
    base = {f"body.{number}": torch.randn(ROWS, COLUMNS, generator=generator) for number in range(TENSORS)}
    save_file(base, folder / "base.safetensors")
    for task, classes in (("a", 2), ("b", 3)):
        head = {"fc.weight": torch.ones(classes, COLUMNS), "fc.bias": torch.ones(classes)}
        noise = torch.randn(ROWS, COLUMNS, generator=generator) * 0.01
        save_file({**{name: value + noise for name, value in base.items()}, **head}, folder / f"{task}.safetensors")
    (folder / "recipe.yaml").write_text(LARGE)
    return folder / "recipe.yaml"


def written(place: Path) -> int:
    """Count bytes in working folders, which another process fills, moves or removes; -1 before there is one."""
    total = -1
    for folder in place.glob(".out.orthomerge-????????"):
        total = max(total, 0)
        for path in folder.rglob("*.safetensors"):
            try:
                total += path.stat().st_size
            except OSError:
                continue
    return total


def seed_of(out: Path) -> int | None:
    """Read the seed that a whole output was made with; None if there is no output."""
    if not out.exists():
        return None
    assert verify_folder(out) == []
    seed: int = json.loads((out / "orthomerge.json").read_text())["seed"]
    return seed


# In bytes, so that it does not matter how busy the machine is; other moments are in `make soak` and `make crash`.
@pytest.mark.parametrize(("share", "older"), [(0.4, False), (0.85, True)])
def test_a_run_that_is_killed(large: Path, tmp_path: Path, start: Start, share: float, older: bool) -> None:
    out = tmp_path / "out"
    if older:
        write(read_recipe(large), out=out)
    process = start(["merge", str(large), "--out", str(out), "--set", "seed=2", *(["--force"] if older else [])])
    until = time.monotonic() + 60
    while process.poll() is None and written(tmp_path) < share * 4 * ROWS * COLUMNS * TENSORS:
        assert time.monotonic() < until
        time.sleep(0.0005)
    process.kill()
    _, error = process.communicate(timeout=60)
    seed = seed_of(out)
    assert process.returncode in (-signal.SIGKILL, 0), error
    assert seed in ((0 if older else None), 2)
    assert process.returncode or seed == 2

    # The same command again does it, and clears away what was left.
    write(read_recipe(large), out=out, force=seed is not None)
    assert seed_of(out) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
