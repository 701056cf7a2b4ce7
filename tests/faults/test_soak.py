"""A short soak; `make soak` has the long one, and kills runs and sweeps at random moments as well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from pathlib import Path
from benchmarks.soak import load, soak
place = Path(sys.argv[1])
result = soak(place / "soak", 10)
assert not result.wrong and not result.left, (result.wrong, result.left)
assert result.descriptors[1] == result.descriptors[-1], result.descriptors
assert result.growth < 256 * 1024, result.resident
wrong, weights, records, seconds = load(place / "load", 4, processes=2)
assert not wrong and len(weights) == len(records) == 1, wrong
"""


def test_merges_in_a_row_and_jobs_at_once(tmp_path: Path) -> None:
    """In a process of its own, which may fork before any thread has started."""
    for name in ("soak", "load"):
        (tmp_path / name).mkdir()
    program = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    ended = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
