"""What tests of jobs share: a recipe that is cut into all kinds, commands as processes, and hashes of a run."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.running.making import BARE

from orthomerge.running.jobs.job import Job, make_job
from orthomerge.running.jobs.plan import Plan, write_plan

CUT = (
    BARE
    + """\
max_shard_size: 30KB
align: {data: {two: two.csv, three: three.csv}, aligner: ridge}
evaluate:
  data: {two: two.csv, three: three.csv}
  protocols: [current, {protocol: knn, shots: [1, 5], seeds: 2}]
  device: cpu
diagnose: false
report: false
"""
)
PARTS = ("--part", "20")
_TIMED = ("stages.json", "run.json", "plan.json")


def start(*words: str | Path, cache: Path) -> subprocess.Popen[str]:
    """The command `orthomerge`, started as a user would, with a cache of its own."""
    environment = {**os.environ, "ORTHOMERGE_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "orthomerge.cli.app", *map(str, words)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def ended(process: subprocess.Popen[str]) -> str:
    """What a command said, which must have gone well."""
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    return said


def hashes(run: Path) -> dict[str, str]:
    """Every file of a run that does not tell times: outputs, records, and what jobs made."""
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run.rglob("*"))
        if path.is_file()
        and not (name := path.relative_to(run).as_posix()).endswith((".done", ".lock"))
        and name not in _TIMED
    }


def done_files(run: Path) -> dict[str, bytes]:
    """Who did which job, and when."""
    return {path.stem: path.read_bytes() for path in (run / "jobs").glob("*.done")}


def until(found: Callable[[], Any], *, seconds: float = 120) -> Any:
    """Wait for something to be there."""
    last = time.monotonic() + seconds
    while not (there := found()):
        assert time.monotonic() < last, "it never came"
        time.sleep(0.002)
    return there


def worker_at(run: Path, *, but: Sequence[int] = ()) -> int | None:
    """The process that holds a lease on some job."""
    for path in (run / "jobs").glob("*.lease"):
        try:
            _, pid = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if pid not in but:
            return int(pid)
    return None


def plan_nothing(run: Path, count: int = 3, *, seconds: float = 0) -> list[Job]:
    """A plan of jobs that do nothing, each after the one before it."""
    jobs: list[Job] = []
    for number in range(count):
        jobs.append(make_job("nothing", {"number": number, "seconds": seconds}, needs=jobs[-1:]))
    run.mkdir(parents=True, exist_ok=True)
    write_plan(run, Plan(tuple(jobs)))
    return jobs
