"""A merge that is killed at any moment leaves nothing, what was there before, or a whole result; the next one runs."""

from __future__ import annotations

import json
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

ROWS, COLUMNS, TENSORS = 600, 600, 12  # 17 MB in float32
TOTAL = 4 * ROWS * COLUMNS * TENSORS
RECIPE = """
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
    (folder / "recipe.yaml").write_text(RECIPE)
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
def test_a_run_that_is_killed(recipe: Path, tmp_path: Path, start: Start, share: float, older: bool) -> None:
    out = tmp_path / "out"
    if older:
        write(read_recipe(recipe), out=out)
    process = start(["merge", str(recipe), "--out", str(out), "--set", "seed=2", *(["--force"] if older else [])])
    until = time.monotonic() + 60
    while process.poll() is None and written(tmp_path) < share * TOTAL:
        assert time.monotonic() < until
        time.sleep(0.0005)
    process.kill()
    _, error = process.communicate(timeout=60)
    seed = seed_of(out)
    assert process.returncode in (-signal.SIGKILL, 0), error
    assert seed in ((0 if older else None), 2)
    assert process.returncode or seed == 2

    # The same command again does it, and clears away what was left.
    write(read_recipe(recipe), out=out, force=seed is not None)
    assert seed_of(out) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_runs_at_once(recipe: Path, tmp_path: Path, start: Start) -> None:
    """One of them does it; the other one is refused, or came too late."""
    words = ["merge", str(recipe), "--out", str(tmp_path / "out")]
    runs = [start(words), start(words)]
    errors = [run.communicate(timeout=60)[1] for run in runs]
    assert sorted(run.returncode for run in runs) == [0, 5], errors
    refusal = next(error for run, error in zip(runs, errors, strict=True) if run.returncode)
    assert "another run is writing to the same output" in refusal or "exists already" in refusal
    assert seed_of(tmp_path / "out") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
