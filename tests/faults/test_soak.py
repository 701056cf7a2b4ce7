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
result = soak(Path(sys.argv[1]), 10)
assert not result.wrong and not result.left, (result.wrong, result.left)
assert result.descriptors[1] == result.descriptors[-1], result.descriptors
assert result.growth < 256 * 1024, result.resident
killed, wrong = soak_runs(Path(sys.argv[3]), 2)
assert killed and not wrong, (killed, wrong)
wrong, weights, records, seconds = load(Path(sys.argv[2]), 4, processes=2)
assert not wrong and len(weights) == len(records) == 1, wrong
"""


def test_merges_in_a_row_and_jobs_at_once(tmp_path: Path) -> None:
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
