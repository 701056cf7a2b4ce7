"""The same recipe and seed give the same bytes, whatever the world around them is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.aligning import contents
from tests.faults.tiny import TASKS, recipe_for, write_experts

from orthomerge.core.errors import RecipeError
from orthomerge.core.threads import THREADS
from orthomerge.merging.methods import METHODS
from orthomerge.runs.models import write
from orthomerge.runs.sections import Fit

ROOT = Path(__file__).resolve().parents[2]
ONE = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C"}
OTHER = {
    "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "PYTHONHASHSEED": "4711",
    "TZ": "Asia/Kathmandu", "LC_ALL": "tr_TR.UTF-8", "PYTHONUTF8": "0",
}  # fmt: skip


def start(folder: Path, world: dict[str, str]) -> subprocess.Popen[str]:
    """All outputs of `worlds` in a process of its own."""
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    common = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "ORTHOMERGE_CACHE": str(folder / "cache")}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.faults.worlds", str(folder / "models"), str(folder / "out")],
        env={**os.environ, **common, **world},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_worlds(tmp_path: Path) -> None:
    """Every method, four aligners, two fits. Threads, hash seed, locale, zone, shards, order of files: all differ."""
    write_experts(tmp_path / "one" / "models", width=48, rows=16)
    write_experts(tmp_path / "other" / "models", width=48, rows=16, shard="10KB", backwards=True)
    assert len(list((tmp_path / "other" / "models" / "two").glob("*.safetensors"))) > 3
    runs = [start(tmp_path / "one", ONE), start(tmp_path / "other", OTHER)]
    ended = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], [error for _, error in ended]
    one, other = (json.loads(output.splitlines()[-1]) for output, _ in ended)
    assert set(METHODS) <= set(one)
    assert {name: one[name] == other[name] for name in one} == dict.fromkeys(one, True)


def test_the_same_again_in_one_process(experts: Path, tmp_path: Path) -> None:
    """Nothing is carried over from one run to the next: no generator, no cache, no thread count."""
    recipe = recipe_for(experts, "dare", seed=5)
    outputs = [contents(write(recipe, out=tmp_path / name).out) for name in ("a", "b")]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("threads", ["0", "many", ""])
def test_threads_of_a_fit(experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: str) -> None:
    fit = Fit({task: str(experts / f"{task}.csv") for task in TASKS}, device="cpu")
    recipe = recipe_for(experts, "moma", fit=fit)
    monkeypatch.setenv(THREADS, threads)
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(RecipeError, match=f"ORTHOMERGE_THREADS must be a number of threads, got '{threads}'"):
        write(recipe, out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
