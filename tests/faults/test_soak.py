"""A short soak: `make soak` has the long one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from pathlib import Path
from benchmarks.soak import load, soak, soak_runs
found = soak(Path(sys.argv[1]), 20)
assert not found.wrong and not found.left, (found.wrong, found.left)
assert found.descriptors[1] == found.descriptors[-1], found.descriptors
assert found.growth < 256 * 1024, found.resident
killed, wrong = soak_runs(Path(sys.argv[3]), 2)
assert killed and not wrong, (killed, wrong)
wrong, weights, records, seconds = load(Path(sys.argv[2]), 6, processes=3)
assert not wrong and len(weights) == len(records) == 1, wrong
"""


def test_twenty_merges_two_kills_of_runs_and_six_jobs_at_once(tmp_path: Path) -> None:
    """In a process of its own, which may fork before any thread has started."""
    folders = [tmp_path / "soak", tmp_path / "load", tmp_path / "runs"]
    for folder in folders:
        folder.mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, folders)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
