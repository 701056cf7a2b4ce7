"""Starting torchrun as a user does, and the folders that its runs read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml
from tests.aligning import HEADS, write_tables

ROOT = Path(__file__).resolve().parents[2]
QUICK = {"steps": 6, "look": 2, "batch": 5}


def torchrun(
    *arguments: object, restarts: int = 0, count: int = 2, cache: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`torchrun --standalone` with processes on the CPU, or on the GPU where there is one process."""
    known = {"OMP_NUM_THREADS": "1", "ORTHOMERGE_CACHE": str(cache), "ORTHOMERGE_TIMEOUT": "120"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return subprocess.run(
        [*command, "--max-restarts", str(restarts), "-m", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **known, **variables},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def codes(done: subprocess.CompletedProcess[str]) -> list[int]:
    """What the processes exited with, as torchrun tells it."""
    return sorted(map(int, re.findall(r"exitcode\s+: (-?\d+)", done.stderr)))


def told(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Our own messages."""
    return [line for line in done.stderr.splitlines() if line.startswith("orthomerge: ")]


def write_recipe(folder: Path, berts: Path, method: str, options: Mapping[str, object], **fit: object) -> Path:
    """A recipe over the small BERTs with inputs of every task."""
    tables = folder / "tables"
    if not tables.exists():
        tables.mkdir()
        write_tables(tables)
    document = {
        "experts": {task: str(berts / task) for task in HEADS},
        "base": str(berts / "base"),
        "method": method,
        "parameters": dict(options),
        "fit": {"data": {task: str(tables / f"{task}.csv") for task in HEADS}, **fit},
    }
    path = folder / f"{method}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path
