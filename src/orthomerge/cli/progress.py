"""How far the work is: a bar on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from orthomerge.core.progress import SILENT, Watch

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from orthomerge.core.progress import Progress


_EVERY = 5.0  # seconds between lines in a log


@contextmanager
def shown(*, quiet: bool) -> Iterator[Progress]:
    """Progress to standard error, or none."""
    if quiet:
        yield SILENT
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            yield _Bar(bar)
    else:
        yield _Lines()


@contextmanager
def watched(*, quiet: bool) -> Iterator[Watch | None]:
    """A run of several stages, to standard error: those that are over, one line each, and a bar under them."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True, highlight=False), transient=True) as bar:
            yield _Stages(_Bar(bar), lambda text: bar.console.print(text, markup=False))
    else:
        yield _Stages(_Lines(), lambda text: sys.stderr.write(f"{text}\n"))


class _Stages(Watch):
    """Stages by number and name; what happens within one is told under its name."""

    def __init__(self, within: Progress, tell: Callable[[str], object]) -> None:
        self._within, self._tell, self._prefix = within, tell, ""

    def begin(self, name: str, *, place: int, count: int) -> None:
        self._prefix = f"[{place}/{count}] {name}"
        self._within.stage(self._prefix, None)

    def end(self, name: str, *, place: int, count: int, seconds: float, found: bool) -> None:
        self._tell(f"[{place}/{count}] {name}: {'found, unchanged' if found else f'done in {seconds:.1f} s'}")

    def stage(self, title: str, total: int | None) -> None:
        self._within.stage(f"{self._prefix}: {title}" if self._prefix else title, total)

    def advance(self, count: int) -> None:
        self._within.advance(count)


class _Bar:
    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._task = bar.add_task("opening", total=None)

    def stage(self, title: str, total: int | None) -> None:
        self._bar.reset(self._task, description=title, total=total)

    def advance(self, count: int) -> None:
        self._bar.advance(self._task, count)


class _Lines:
    def __init__(self) -> None:
        self._title, self._total, self._done = "", 0, 0
        self._started = self._last = time.monotonic()

    def stage(self, title: str, total: int | None) -> None:
        self._title, self._total, self._done = title, total or 0, 0
        self._started = self._last = time.monotonic()
        size = f" {total / 1e6:,.0f} MB" if total else ""
        sys.stderr.write(f"{title}{size}\n")

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._last < _EVERY:
            return
        self._last = now
        rate = self._done / (now - self._started)
        left = (self._total - self._done) / rate if rate else 0
        share = 100 * self._done / self._total if self._total else 0
        sys.stderr.write(f"{self._title} {share:.0f} % ({rate / 1e6:,.0f} MB/s, {left:.0f} s left)\n")
