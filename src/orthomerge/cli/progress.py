"""How far the work is: a bar on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from orthomerge.core.progress import Watch

if TYPE_CHECKING:
    from rich.progress import Progress

_EVERY = 5.0  # seconds between lines in a log


class Reporter(Watch):
    """Stages of one piece of work, or of several that begin and end, on standard error. `bar`: on a terminal."""

    def __init__(self, bar: Progress | None = None) -> None:
        self._bar, self._prefix = bar, ""
        self._task = None if bar is None else bar.add_task("opening", total=None)
        self.stage("", None)

    def begin(self, name: str, *, place: int, count: int) -> None:
        self._prefix = f"[{place}/{count}] {name}"
        self.stage("", None)

    def end(self, name: str, *, place: int, count: int, seconds: float, found: bool) -> None:
        self._line(f"[{place}/{count}] {name}: {'found, unchanged' if found else f'done in {seconds:.1f} s'}")

    def stage(self, title: str, total: int | None) -> None:
        self._title = ": ".join(filter(None, (self._prefix, title)))
        self._total, self._done = total or 0, 0
        self._started = self._last = time.monotonic()
        if self._bar is not None and self._task is not None:
            self._bar.reset(self._task, description=self._title, total=total)
        elif self._title:
            self._line(self._title + (f" {total / 1e6:,.0f} MB" if total else ""))

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, count)
        elif now - self._last >= _EVERY:
            self._last, rate = now, self._done / (now - self._started)
            left = (self._total - self._done) / rate if rate else 0
            share = 100 * self._done / self._total if self._total else 0
            self._line(f"{self._title} {share:.0f} % ({rate / 1e6:,.0f} MB/s, {left:.0f} s left)")

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False)
        else:
            sys.stderr.write(f"{text}\n")


@contextmanager
def shown(*, quiet: bool) -> Iterator[Watch]:
    """Progress to standard error, or none."""
    if quiet or not sys.stderr.isatty():
        yield Watch() if quiet else Reporter()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True, highlight=False), transient=True) as bar:
        yield Reporter(bar)
