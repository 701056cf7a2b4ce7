"""A merge that is killed at any moment leaves nothing, what was there before, or a whole result; the next one runs."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from orthomerge.models.saved import verify_folder
from orthomerge.runs.models import write
from orthomerge.runs.recipe import read_recipe

Start = Callable[..., "subprocess.Popen[str]"]

ROWS, COLUMNS, TENSORS = 600, 600, 24  # 35 MB in float32
TOTAL = 4 * ROWS * COLUMNS * TENSORS


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe for a model that takes a moment to merge."""
    folder = tmp_path_factory.mktemp("large")
    generator = torch.Generator().manual_seed(0)
    base = {f"body.{number}": torch.randn(ROWS, COLUMNS, generator=generator) for number in range(TENSORS)}
    save_file(base, folder / "base.safetensors")
    for task, classes in (("a", 2), ("b", 3)):
        head = {"fc.weight": torch.ones(classes, COLUMNS), "fc.bias": torch.ones(classes)}
        noise = torch.randn(ROWS, COLUMNS, generator=generator) * 0.01
        save_file({**{name: value + noise for name, value in base.items()}, **head}, folder / f"{task}.safetensors")
    (folder / "recipe.yaml").write_text(
        "base: base.safetensors\n"
        "experts:\n"
        "  a: {path: a.safetensors, head: {layers: [fc]}}\n"
        "  b: {path: b.safetensors, head: {layers: [fc]}}\n"
        "family: generic\nencoder_prefix: body\nmethod: ties\nmax_shard_size: 12MB\nout: out\n"
    )
    return folder / "recipe.yaml"


def written(partial: Path) -> int:
    """Bytes in a folder that another process is writing, moving or removing."""
    total = 0
    try:
        for path in partial.rglob("*"):
            total += path.stat().st_size if path.is_file() else 0
    except OSError:
        pass
    return total


def wait_for(process: subprocess.Popen[str], moment: Callable[[], bool]) -> None:
    """Wait until a moment has come, or the process has ended."""
    until = time.monotonic() + 60
    while process.poll() is None and not moment():
        assert time.monotonic() < until
        time.sleep(0.0005)


def seed_of(out: Path) -> int | None:
    """The seed that a whole output was made with; None if there is no output."""
    if not out.exists():
        return None
    assert verify_folder(out) == []
    seed: int = json.loads((out / "orthomerge.json").read_text())["seed"]
    return seed


# From before the first byte to the very end; in bytes, so that it does not matter how busy the machine is.
BEGUN, MADE, FIRST, SECOND, LAST, ALL = -0.1, 0.0, 0.05, 0.4, 0.85, 0.99999
CASES = [
    *((signal.SIGKILL, share) for share in (BEGUN, FIRST, LAST, MADE, SECOND, ALL)),
    *((signal.SIGINT, share) for share in (BEGUN, FIRST, ALL)),
    *((signal.SIGTERM, share) for share in (MADE, SECOND, LAST)),
]
CASES = CASES if os.environ.get("CRASH_POINTS") == "all" else CASES[::2]


@pytest.mark.parametrize(("number", "share"), CASES)
def test_a_run_that_is_killed(recipe: Path, tmp_path: Path, start: Start, number: signal.Signals, share: float) -> None:
    out, working = tmp_path / "out", ".out.orthomerge-????????"
    old = 1 if share in (FIRST, LAST) else None  # some of them replace an earlier output
    if old is not None:
        write(read_recipe(recipe), out=out)
        manifest = json.loads((out / "orthomerge.json").read_text())
        (out / "orthomerge.json").write_text(json.dumps(manifest | {"seed": old}))

    words = ["merge", str(recipe), "--out", str(out), "--set", "seed=2", *(["--force"] if old else [])]
    process = start(words)
    if share < 0:
        wait_for(process, (tmp_path / ".out.orthomerge-lock").exists)
    elif share == 0:
        wait_for(process, lambda: any(tmp_path.glob(working)))
    else:
        wait_for(process, lambda: sum(map(written, tmp_path.glob(working))) >= share * TOTAL)
    time.sleep(random.Random(share * 7 + number).random() * 0.02)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)

    found = seed_of(out)
    assert found in (old, 2)
    if process.returncode == 128 + number:  # the program itself has cleared up
        assert "Traceback" not in error
        assert [path.name for path in tmp_path.iterdir()] == (["out"] if found else [])
    elif number == signal.SIGKILL and process.returncode:
        assert process.returncode == -signal.SIGKILL
    else:  # all was done before the signal came; the interpreter on its way out may still be ended by it
        assert process.returncode in (0, -number), error
        assert found == 2

    # The same command again does it, and clears away what was left.
    again = write(read_recipe(recipe), out=out, force=found is not None)
    assert again.manifest["seed"] == 0
    assert seed_of(out) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_runs_at_once(recipe: Path, tmp_path: Path, start: Start) -> None:
    """One of them does it; the other is told so, or that it came too late."""
    words = ["merge", str(recipe), "--out", str(tmp_path / "out")]
    runs = [start(words), start(words)]
    ended = [run.communicate(timeout=60)[1] for run in runs]
    assert sorted(run.returncode for run in runs) == [0, 5], ended
    refusal = next(error for run, error in zip(runs, ended, strict=True) if run.returncode)
    assert "another run is writing to the same output" in refusal or "exists already" in refusal
    assert seed_of(tmp_path / "out") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
