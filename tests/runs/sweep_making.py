"""What tests of sweeps share: a recipe with a block `sweep` over tiny experts."""

from __future__ import annotations

import hashlib
from pathlib import Path

SHARED = """\
base: base
experts: {two: two, three: three}
evaluate:
  data: {two: two.csv, three: three.csv}
  device: cpu
report: {title: Two words}
"""
SWEEP = (
    SHARED
    + """\
sweep:
  methods: [average, task_arithmetic, {method: dare, parameters: {drop: 0.5}}]
  scales: [0.3, 0.6]
  seeds: 2
  aligners: [none, ridge]
  shots: [2, all]
"""
)
RUN = (
    SHARED
    + """\
sweep:
  methods: [task_arithmetic, {method: dare, parameters: {drop: 0.5}}]
  scales: [0.4]
  seeds: 2
  aligners: [none, ridge]
  shots: [2, all]
"""
)
PLAIN = SHARED.replace("report: {title: Two words}", "report: false")
SMALL = PLAIN + "sweep: {methods: [average, task_arithmetic], scales: [0.5], aligners: [none]}\n"
_TOLD = ("records.jsonl", "validation.jsonl", "comparisons.json", "notes.json", "table.md", "sweep.csv", "sweep.md")


def outcome(run: Path) -> dict[str, str]:
    """Hashes of every number that a sweep made, in words or not."""
    paths = [run / name for name in _TOLD] + sorted((run / "predictions").iterdir())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
