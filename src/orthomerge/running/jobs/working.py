"""A worker without an engine: it does jobs of a plan that lies in a folder which all workers see.

With a shard, i of N, it does the jobs whose place in the plan is i modulo N, and waits for those of others; a plan is
in an order in which nobody waits for ever as long as all N are there. Without one it takes whatever is free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orthomerge.errors import OrthomergeError, RecipeError
from orthomerge.running.jobs.doing import attempt
from orthomerge.running.jobs.executors import failed
from orthomerge.running.jobs.job import Job
from orthomerge.running.jobs.leases import clock, holder
from orthomerge.running.jobs.plan import read_plan
from orthomerge.running.jobs.store import Store
from orthomerge.running.watching import Silent, Watch

__all__ = ["PATIENCE", "Worked", "parse_shard", "work"]

PATIENCE = 3600.0  # seconds without any news from others
_SHORTEST, _TELL, _LONGEST = 0.05, 0.5, 2.0  # seconds between two looks, and from which on it is told


@dataclass(frozen=True)
class Worked:
    """What a worker did: titles of jobs done by it, how many it found done, and whether the run is complete."""

    run: Path
    done: list[str]
    found: int
    complete: bool


def parse_shard(text: str) -> tuple[int, int]:
    """`2/4` as (2, 4)."""
    first, slash, second = text.partition("/")
    if not (slash and first.isdecimal() and second.isdecimal()) or not 1 <= int(first) <= int(second):
        raise RecipeError(f"a shard is i/N with i from 1 to N, for example 1/4, got {text!r}")
    return int(first), int(second)


def work(
    run: str | Path,
    *,
    shard: tuple[int, int] | None = None,
    steal: bool = False,
    patience: float = PATIENCE,
    watch: Watch | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Worked:
    """Do a worker's part of the jobs in a run folder that `orthomerge run --plan-only` planned.

    `steal`: do jobs of other shards too while there is none of one's own. `patience`: how long to wait for others
    without any news of them.
    """
    folder = Path(run).expanduser()
    jobs = read_plan(folder).jobs
    number, count = shard or (1, 1)
    own = [job.key for job in jobs[number - 1 :: count]]
    began = clock(folder)
    return _Worker(folder, jobs, own, steal or shard is None, count, patience, watch or Silent(), say, began).go()


@dataclass
class _Worker:
    run: Path
    jobs: Sequence[Job]
    own: Sequence[str]
    steal: bool
    shards: int
    patience: float
    watch: Watch
    say: Callable[[str], None]
    began: float
    known: set[str] = field(default_factory=set)
    mine: list[str] = field(default_factory=list)

    def go(self) -> Worked:
        """Until all of one's own are done; whoever takes anything works until everything is."""
        store = Store(self.run)
        self.known = {job.key for job in self.jobs if store.found(job.key) is not None}
        found = len(self.known)
        wanted = {job.key for job in self.jobs} if self.steal else set(self.own)
        pause, last, told = _SHORTEST, time.monotonic(), False
        while not wanted <= self.known:
            if self._pass(wanted):
                pause, last, told = _SHORTEST, time.monotonic(), False
                continue
            if time.monotonic() - last > self.patience:
                raise OrthomergeError(self._stuck(wanted))
            if not told and pause > _TELL:
                self.say(f"waiting for {self._waits_for(wanted)}")
                told = True
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        complete = len(self.known) == len(self.jobs)
        if complete:
            store.keep(self.known)  # workers that were killed may have left something
        return Worked(self.run, self.mine, found, complete)

    def _pass(self, wanted: set[str]) -> bool:
        """Do all jobs that can be done, own ones first; whether there is any news."""
        news = self._look(wanted)
        own = set(self.own)
        for job in sorted(self._open(wanted), key=lambda job: job.key not in own):
            if any(need not in self.known for need in job.needs):
                continue
            marked = Store(self.run).is_marked(job.key)
            self.watch.begin(job.title, place=len(self.known) + 1, count=len(self.jobs))
            done = attempt(self.run, job.key)
            if done is None:  # somebody else is at it
                continue
            news = True
            self.known.add(job.key)
            self.watch.end(job.title, seconds=done.seconds, found=marked)
            if not marked:
                self.mine.append(job.title)
        return news

    def _look(self, wanted: set[str]) -> bool:
        """See what others have done; what they failed at since this worker started is an error here too."""
        store = Store(self.run)
        marked = store.marked()
        new = {job.key for job in self.jobs if job.key not in self.known and job.key in marked}
        new = {key for key in new if store.found(key) is not None}
        self.known |= new
        needed = {need for job in self._open(wanted) for need in job.needs if need not in self.known}
        for key in needed - set(self.own):
            if not self.steal and (told := store.failure(key, since=self.began)) is not None:
                raise failed(told)
        return bool(new)

    def _open(self, wanted: set[str]) -> list[Job]:
        return [job for job in self.jobs if job.key in wanted and job.key not in self.known]

    def _blocking(self, wanted: set[str]) -> tuple[int, Job]:
        """The first job that is missing, and its place in the plan."""
        needed = {need for job in self._open(wanted) for need in job.needs if need not in self.known}
        among = needed or {job.key for job in self._open(wanted)}
        return next((place, job) for place, job in enumerate(self.jobs) if job.key in among)

    def _waits_for(self, wanted: set[str]) -> str:
        place, job = self._blocking(wanted)
        who = holder(Store(self.run).folder, job.key)
        whose = f" of shard {place % self.shards + 1}/{self.shards}" if self.shards > 1 else ""
        return f"the job {job.title!r} ({job.key[:12]}){whose}, which {f'{who} is at' if who else 'nobody is at'}"

    def _stuck(self, wanted: set[str]) -> str:
        steal = "" if self.steal else ", or give --steal to do its jobs here"
        return (
            f"nothing new for {self.patience:g} s; this worker waits for {self._waits_for(wanted)}: start that worker "
            f"again (or see why it failed){steal}"
        )
