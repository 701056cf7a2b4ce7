"""The command itself, in a process of its own, and the small experts of all tests of crashes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.injection import Injector, injector, memory_folder
from tests.faults.tiny import commands, evaluation, recipe_for, write_experts

from orthomerge.runs.models import write

# No variable holds the program back from the network: that it stays away is its own doing.
ONLINE = {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "0", "DO_NOT_TRACK": "0"}


@pytest.fixture(scope="session")
def experts(once: Callable[..., Path]) -> Path:
    """A folder with the smallest BERT `base` and experts `two` and `three`, and TASK.csv for each."""
    return once("tiny", write_experts)


@pytest.fixture(scope="session")
def merged(once: Callable[..., Path], experts: Path) -> Path:
    """The output folder of the average of `experts`."""
    return once("tiny-merged", lambda folder: write(recipe_for(experts), out=folder / "out")) / "out"


@pytest.fixture(scope="session")
def injected(experts: Path, merged: Path) -> Iterator[Injector]:
    """One process for all tests of calls that fail; every command has run in it once, into `older-NAME` beside root."""
    with memory_folder() as folder:
        words = {**commands(experts, merged, seed=1), "evaluate": evaluation(experts, merged)}
        warm = [[*each, "--out", str(folder / f"older-{name}")] for name, each in words.items()]
        warm.append(["report", str(folder / "older-evaluate"), "--out", str(folder / "older.html")])
        home = {"HOME": str(folder / "home"), "HF_HOME": str(folder / "home" / "hf")}
        with injector(folder / "root", warm=warm, environment={**ONLINE, **home}) as process:
            assert process.run(["inspect", str(experts / "two")]).code == 0  # it has loaded everything when it answers
            yield process


@pytest.fixture
def start() -> Callable[..., subprocess.Popen[str]]:
    """`start(words)`: the program in a process of its own."""

    def starter(words: list[str], **options: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            [sys.executable, "-m", "orthomerge", *words], text=True, env=environment, **{**pipes, **options}
        )

    return starter
