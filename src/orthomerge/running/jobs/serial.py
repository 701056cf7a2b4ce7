"""All jobs in this process, one after the other: what every other executor must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orthomerge.running.jobs.doing import do
from orthomerge.running.jobs.executors import Order
from orthomerge.running.jobs.job import Job
from orthomerge.running.jobs.store import Done
from orthomerge.running.watching import Watch

__all__ = ["Serial"]


@dataclass(frozen=True)
class Serial:
    """In the order of the plan."""

    def map(self, run: Path, jobs: Sequence[Job], watch: Watch) -> dict[str, Done]:
        order = Order(run, jobs, watch)
        while (key := order.take()) is not None:
            order.finish(key, do(run, key))
        return order.done
