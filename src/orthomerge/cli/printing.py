"""Output of commands: documents, tables, messages and progress."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, Any

import click

from orthomerge.core.progress import Watch
from orthomerge.core.table import Table, plain

if TYPE_CHECKING:
    from rich.progress import Progress

    from orthomerge.analysis.diagnosis import Diagnosis
    from orthomerge.evaluation.metrics import Score

_EVERY = 5.0  # seconds between lines of progress in a log


def print_json(document: Any) -> None:
    """Print a document as JSON."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False, default=str))


def print_tables(tables: Iterable[Table]) -> None:
    """Print tables as wide as the terminal, with a blank line before each title."""
    width = get_terminal_size().columns
    for table in tables:
        if table.title:
            click.echo(f"\n{plain(table.title)}")
        header, *rows = table.text(width).split("\n")
        click.echo("\n".join((click.style(header, bold=True), *rows)))
        if table.note:
            click.echo(fill(plain(table.note), width))


def print_progress(text: str) -> None:
    """Print a line on standard error."""
    sys.stderr.write(f"{text}\n")


def score_cell(score: Score) -> str:
    """Format a score in percent with its interval."""
    return f"{100 * score.value:.1f} ({100 * score.low:.1f}-{100 * score.high:.1f})"


def print_alignment(manifest: Mapping[str, Any]) -> None:
    """Print one line per task: number of inputs, facts of the aligner, parameters added; then the notes."""
    alignment = manifest["alignment"]
    for task, results in alignment["tasks"].items():
        facts = ", ".join(f"{name} {_shown(value)}" for name, value in results["facts"].items()) or "no facts"
        added = results["extra"]["parameters"]
        size = f"{added:,} parameters added" if added else "nothing added"
        data = f"{results['inputs']} inputs of {alignment['split']}"
        click.echo(f"{task}: {alignment['aligner']} on {data}; {facts}; {size}")
    for note in manifest["notes"]:
        click.echo(f"note: {note}")


def print_fit(manifest: Mapping[str, Any]) -> None:
    """Print the method and inputs of a fit, and its results except tables."""
    fit = manifest["fit"]
    inputs = ", ".join(f"{task} {facts['inputs']}" for task, facts in fit["tasks"].items())
    click.echo(f"{manifest['method']['name']} on unlabelled inputs of {fit['split']} ({fit['access']}): {inputs}")
    for name, value in fit["facts"].items():
        numbers = value if isinstance(value, Mapping) else {"": value}
        if not any(isinstance(number, Mapping) for number in numbers.values()):
            texts = (f"{key} {_shown(number)}".strip() for key, number in numbers.items())
            click.echo(f"  {name.replace('_', ' ')}: {', '.join(texts)}")


def print_verdict(diagnosis: Diagnosis) -> None:
    """Print every finding under its title."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False)
    for finding in diagnosis.verdict:
        console.print(Text(finding.title, style="bold"))
        console.print(Padding(Text(finding.text), (0, 0, 1, 2)))


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Reporter(Watch):
    """Show progress on standard error: a bar on a terminal, else a line per stage and one every few seconds."""

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
    """Report progress on standard error inside the block, unless `quiet`."""
    if quiet or not sys.stderr.isatty():
        yield Watch() if quiet else Reporter()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True, highlight=False), transient=True) as bar:
        yield Reporter(bar)
