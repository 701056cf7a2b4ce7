"""The same recipe and seed give the same bytes, whatever the world around them is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.berts import contents
from tests.faults.tiny import TASKS, recipe_for, write_experts

from orthomerge.alignment.align import align
from orthomerge.core.device import THREADS
from orthomerge.core.errors import RecipeError
from orthomerge.merging.methods import METHODS
from orthomerge.models.encoding import Encoding
from orthomerge.runs.models import write
from orthomerge.runs.sections import Fit

ROOT = Path(__file__).resolve().parents[2]
OTHER = {
    "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "PYTHONHASHSEED": "4711",
    "TZ": "Asia/Kathmandu", "LC_ALL": "tr_TR.UTF-8", "PYTHONUTF8": "0",
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {"wudi": {"steps": 3}, "slerp": {"t": 0.4}}
STEPS = {"steps": 3, "look": 1, "batch": 4}
PROGRAM = """
import sys
from pathlib import Path
from tests.faults.test_determinism import write_outputs
write_outputs(*map(Path, sys.argv[1:]))
"""


def write_outputs(models: Path, place: Path) -> None:
    """Write an output of every method that needs no data, four aligners and two fits."""
    plain = recipe_for(models, seed=3)
    data: Any = {task: str(models / f"{task}.csv") for task in TASKS}
    for name in METHODS:
        write(replace(plain, method=name, parameters=OPTIONS.get(name, {})), out=place / name)
    for name in ("ridge", "kl-map", "aligned-c", "orthogonal"):
        align(place / "average", data, aligner=name, encoding=Encoding(device="cpu")).save(place / name)
    for name in ("moma", "realign"):
        write(replace(plain, method=name, parameters=STEPS, fit=Fit(data, device="cpu")), out=place / name)


def comparable(out: Path) -> dict[str, Any]:
    """Read an output, but for what it says of its input files and of the place where they were."""
    files = contents(out)
    for name in ("README.md", "orthomerge.local.json"):
        files.pop(name, None)
    document = json.loads(files["orthomerge.json"], object_hook=without_files)
    return {**files, "orthomerge.json": document}


def without_files(block: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in block.items() if key != "files"}


def test_two_worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process and in one where threads, hash seed, locale, zone, shards and order of files differ."""
    one, other = tmp_path / "one", tmp_path / "other"
    write_experts(one / "models", width=48)
    write_experts(other / "models", dict(reversed(TASKS.items())), width=48, shard="10KB")
    assert len(list((other / "models" / "two").glob("*.safetensors"))) > 3
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    common = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "ORTHOMERGE_CACHE": str(other / "cache")}
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(other / "models"), str(other / "out")],
        env={**os.environ, **common, **OTHER},
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(one / "cache"))
    write_outputs(one / "models", one / "out")
    _, error = child.communicate(timeout=300)
    assert child.returncode == 0, error
    names = [out.name for out in (one / "out").iterdir()]
    assert set(METHODS) < set(names)
    same = {name: comparable(one / "out" / name) == comparable(other / "out" / name) for name in names}
    assert same == dict.fromkeys(names, True)


@pytest.mark.parametrize("threads", ["0", "many", ""])
def test_threads_of_a_fit(experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: str) -> None:
    fit = Fit({task: str(experts / f"{task}.csv") for task in TASKS}, device="cpu")
    recipe = recipe_for(experts, "moma", fit=fit)
    monkeypatch.setenv(THREADS, threads)
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(RecipeError, match=f"ORTHOMERGE_THREADS must be a number of threads, got '{threads}'"):
        write(recipe, out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
