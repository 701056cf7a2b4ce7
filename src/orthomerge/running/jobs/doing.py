"""Doing one job: found done, or waited for while another is at it, or done now."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path

from orthomerge.errors import OrthomergeError
from orthomerge.running.jobs.context import Context
from orthomerge.running.jobs.executors import told_failure
from orthomerge.running.jobs.kinds.table import find_kind
from orthomerge.running.jobs.leases import leased
from orthomerge.running.jobs.plan import read_plan
from orthomerge.running.jobs.store import Done, Store
from orthomerge.threads import fixed_threads

__all__ = ["attempt", "do"]

_LOOK = 0.2  # seconds between two looks at a job that somebody else is at


def do(run: Path, key: str) -> Done:
    """Do a job unless it is done; if somebody else is at it, wait for them or, should they die, take it over."""
    while True:
        done = attempt(run, key)
        if done is not None:
            return done
        time.sleep(_LOOK)


def attempt(run: Path, key: str) -> Done | None:
    """Do a job unless it is done; None if somebody else is at it."""
    store = Store(run)
    if (done := store.found(key)) is not None:
        return done
    with leased(store.folder, key) as ours:
        if not ours:
            return None
        try:
            return store.found(key) or _make(run, key, store)
        except OrthomergeError as error:
            store.fail(key, told_failure(error))
            raise


def _make(run: Path, key: str, store: Store) -> Done:
    plan = read_plan(run)
    job = plan.by_key.get(key)
    if job is None:
        raise OrthomergeError(f"{run} has no job {key[:12]} any more: it was planned anew; start the workers again")
    kind, context = find_kind(job.kind), Context(run, plan, job)
    with fixed_threads() if kind.computes else nullcontext():
        return store.make(key, job.kind, lambda folder: kind.load()(context, folder), needs=job.needs)
