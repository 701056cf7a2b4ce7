"""What tests of runs share: a folder with tiny experts, tables of words and recipes."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from tests.berts import write_tables

from orthomerge.core.progress import Progress

RECIPE = """\
base: base
experts: {two: two, three: three}
method: task_arithmetic
parameters: {scale: 0.5}
align: {data: {two: two.csv, three: three.csv}, aligner: ridge}
evaluate:
  data: {two: two.csv, three: three.csv}
  protocols: [current, {protocol: knn, shots: [1, 5], seeds: 2}]
  device: cpu
diagnose: {points: 0, layers: 0, probe: false}
report: {title: Two words}
"""
BARE = RECIPE.partition("align:")[0]
PLAIN = BARE + "evaluate: {data: {two: two.csv}, protocols: [current], device: cpu}\ndiagnose: false\nreport: false\n"

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
RUN = SWEEP.replace("[average, task", "[task").replace("[0.3, 0.6]", "[0.4]")
SWEPT_PLAIN = SHARED.replace("report: {title: Two words}", "report: false")
SMALL = SWEPT_PLAIN + "sweep: {methods: [average, task_arithmetic], scales: [0.5], aligners: [none]}\n"
_WRITTEN = ("records.jsonl", "validation.jsonl", "comparisons.json", "notes.json", "table.md", "sweep.csv", "sweep.md")


def lay_out(berts: Path, folder: Path, recipe: str = RECIPE) -> Path:
    """Models, tables and a recipe in one folder; the path of the recipe."""
    for name in ("base", "two", "three"):
        shutil.copytree(berts / name, folder / name)
    write_tables(folder)
    path = folder / "recipe.yaml"
    path.write_text(recipe)
    return path


class Killed(BaseException):
    """Not an error that anybody catches."""


class KillAt(Progress):
    """Ends a run where a stage begins."""

    def __init__(self, name: str) -> None:
        self._name = name

    def begin(self, name: str, *, place: int, count: int) -> None:
        if name == self._name:
            raise Killed


def outcome(run: Path) -> dict[str, str]:
    """Hashes of every number that a sweep made, in words or not."""
    paths = [run / name for name in _WRITTEN] + sorted((run / "predictions").iterdir())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
