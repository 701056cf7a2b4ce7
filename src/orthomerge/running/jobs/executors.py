"""Who carries out jobs: the order in which they may be done, and the table of executors."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import orthomerge.errors
from orthomerge.errors import OrthomergeError, RecipeError
from orthomerge.running.jobs.job import Job
from orthomerge.running.jobs.store import Done, Store
from orthomerge.running.watching import Watch

__all__ = ["RETRIES", "Executor", "Failure", "Order", "executor_of", "failed", "told_failure"]

RETRIES = 3  # of a job whose worker dies
Failure = tuple[str, str]  # class and message of an error, to cross from one process to another


class Executor(Protocol):
    """Carries out jobs, each after those that it needs; the first error ends it, and what is done is kept."""

    def map(self, run: Path, jobs: Sequence[Job], watch: Watch) -> dict[str, Done]: ...


def executor_of(text: str) -> Executor:
    """`serial`, `process`, `process:N`, `ray`, `ray:N`, or `ray://host:port`."""
    if text == "serial":
        from orthomerge.running.jobs.serial import Serial

        return Serial()
    if found := re.fullmatch(r"process(?::([1-9]\d{0,3}))?", text):
        from orthomerge.running.jobs.processes import Processes

        return Processes(int(found[1] or os.cpu_count() or 1))
    if found := re.fullmatch(r"ray(?::([1-9]\d{0,3})|(://\S+))?", text):
        from orthomerge.running.jobs.ray import Ray

        return Ray(workers=int(found[1]) if found[1] else None, address=text if found[2] else None)
    raise RecipeError(f"{text!r} cannot carry out jobs; use serial, process, process:N, ray, ray:N or ray://host:port")


class Order:
    """Which jobs can be done now. Jobs that are done already are found when it is made."""

    def __init__(self, run: Path, jobs: Sequence[Job], watch: Watch) -> None:
        self._jobs = {job.key: job for job in jobs}
        self._watch = watch
        self.done: dict[str, Done] = {}
        self._waits = {job.key: {need for need in job.needs if need in self._jobs} for job in jobs}
        self._wanted_by: dict[str, list[str]] = {}
        for key, needs in self._waits.items():
            for need in needs:
                self._wanted_by.setdefault(need, []).append(key)
        self._ready = [job.key for job in jobs if not self._waits[job.key]]
        self._ready.reverse()
        store = Store(run)
        for job in jobs:
            if (found := store.found(job.key)) is not None:
                self.finish(job.key, found, found=True)

    def __len__(self) -> int:
        """How many are not done."""
        return len(self._jobs) - len(self.done)

    def title(self, key: str) -> str:
        """A job in words."""
        return self._jobs[key].title

    def take(self) -> str | None:
        """A job that can be done now, in the order of the plan; None if there is none."""
        while self._ready:
            key = self._ready.pop()
            if key not in self.done:
                return key
        return None

    def finish(self, key: str, done: Done, *, found: bool = False) -> None:
        """A job is done; others may have waited for it."""
        if key in self.done:
            return
        self.done[key] = done
        self._watch.begin(self.title(key), place=len(self.done), count=len(self._jobs))
        self._watch.end(self.title(key), seconds=done.seconds, found=found)
        free = []
        for key_of_other in self._wanted_by.get(key, ()):
            waits = self._waits[key_of_other]
            waits.discard(key)
            if not waits:
                free.append(key_of_other)
        self._ready += reversed(free)


def told_failure(error: OrthomergeError) -> Failure:
    """An error as what can be sent."""
    return type(error).__name__, str(error)


def failed(failure: Failure) -> OrthomergeError:
    """The error that was sent: of the same class, with the same words."""
    kind = getattr(orthomerge.errors, failure[0], OrthomergeError)
    known = isinstance(kind, type) and issubclass(kind, OrthomergeError)
    return kind(failure[1]) if known else OrthomergeError(failure[1])
