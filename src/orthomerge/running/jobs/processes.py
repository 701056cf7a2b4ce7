"""Worker processes on this machine. One that dies is replaced, and its job is done again, three times at most."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from orthomerge.errors import OrthomergeError
from orthomerge.running.jobs.executors import RETRIES, Order, failed
from orthomerge.running.jobs.job import Job
from orthomerge.running.jobs.store import Done
from orthomerge.running.watching import Watch
from orthomerge.strict import build

__all__ = ["Processes"]


class _Worker:
    """A process, the job that it is at, and the pipes to it."""

    def __init__(self, run: Path) -> None:
        theirs_in, self._keys = os.pipe()
        self.answers, theirs_out = os.pipe()
        command = [sys.executable, "-m", "orthomerge.running.jobs.worker", str(run), str(theirs_in), str(theirs_out)]
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs_in, theirs_out))  # noqa: S603
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self.key: str | None = None
        self._heard = b""

    def give(self, key: str) -> None:
        self.key = key
        with suppress(BrokenPipeError):  # it is dead, as will show when it is listened to
            os.write(self._keys, f"{key}\n".encode())

    def hear(self) -> bytes | None:
        """A whole answer; nothing where it is not whole yet, None where the process has died."""
        piece = os.read(self.answers, 1 << 16)
        if not piece:
            return None
        self._heard += piece
        line, end, self._heard = self._heard.partition(b"\n")
        if not end:
            self._heard = line
            return b""
        return line

    def end(self) -> int:
        """Let it go, by force if it is at work; its exit code."""
        os.close(self._keys)
        os.close(self.answers)
        if self.key is not None and self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@dataclass(frozen=True)
class Processes:
    """`workers`: how many at once."""

    workers: int

    def map(self, run: Path, jobs: Sequence[Job], watch: Watch) -> dict[str, Done]:
        order = Order(run, jobs, watch)
        with _team() as team:
            deaths: Counter[str] = Counter()
            waiting: list[str] = []
            while len(order):
                self._deal(run, order, team, waiting)
                for worker in _heard_from(team):
                    answer = worker.hear()
                    if answer is None:
                        self._bury(worker, order, team, deaths, waiting)
                    elif answer:
                        _take(json.loads(answer), worker, order)
        return order.done

    def _deal(self, run: Path, order: Order, team: list[_Worker], waiting: list[str]) -> None:
        """A job to whoever is idle, and new workers while there are jobs for them."""
        idle = [worker for worker in team if worker.key is None]
        while idle or len(team) < self.workers:
            key = waiting.pop() if waiting else order.take()
            if key is None:
                return
            if not idle:
                team.append(_Worker(run))
                idle.append(team[-1])
            idle.pop().give(key)

    def _bury(
        self, worker: _Worker, order: Order, team: list[_Worker], deaths: Counter[str], waiting: list[str]
    ) -> None:
        key, pid = worker.key, worker.process.pid
        worker.key = None
        team.remove(worker)
        code = worker.end()
        if key is None:
            return
        deaths[key] += 1
        if deaths[key] > RETRIES:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise OrthomergeError(
                f"the job {order.title(key)!r} ({key[:12]}) was tried {deaths[key]} times and its worker died each "
                f"time, process {pid} by {how}; is there enough memory? Run again with fewer workers, or --on serial"
            )
        waiting.append(key)


@contextmanager
def _team() -> Iterator[list[_Worker]]:
    """Workers, all gone on leaving."""
    team: list[_Worker] = []
    try:
        yield team
    finally:
        for worker in team:
            worker.end()


def _heard_from(team: list[_Worker]) -> list[_Worker]:
    with selectors.DefaultSelector() as selector:
        for worker in team:
            selector.register(worker.answers, selectors.EVENT_READ, worker)
        return [key.data for key, _ in selector.select()]


def _take(answer: dict[str, object], worker: _Worker, order: Order) -> None:
    key, worker.key = worker.key, None
    if "failed" in answer:
        told = answer["failed"]
        raise failed((str(told[0]), str(told[1])) if isinstance(told, list) else ("OrthomergeError", str(told)))
    if key is not None:
        order.finish(key, build(Done, answer["done"], where=f"job {key[:12]}"))
