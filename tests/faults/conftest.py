"""The command itself, in a process of its own, and the small experts of all tests of crashes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.faults.tiny import recipe_for, write_experts

from orthomerge.runs.models import write


@pytest.fixture(scope="session")
def experts(once: Callable[..., Path]) -> Path:
    """A folder with the smallest BERT `base` and experts `two` and `three`, and TASK.csv for each."""
    return once("tiny", write_experts)


@pytest.fixture(scope="session")
def merged(once: Callable[..., Path], experts: Path) -> Path:
    """The output folder of the average of `experts`."""
    return once("tiny-merged", lambda folder: write(recipe_for(experts), out=folder / "out")) / "out"


@pytest.fixture
def start() -> Callable[..., subprocess.Popen[str]]:
    """`start(words)`: the program in a process of its own."""

    def starter(words: list[str], **options: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            [sys.executable, "-m", "orthomerge.cli.app", *words], text=True, env=environment, **{**pipes, **options}
        )

    return starter
