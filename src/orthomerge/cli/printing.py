"""Output of commands: documents, texts, tables and progress."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from shutil import get_terminal_size
from textwrap import TextWrapper, fill
from typing import TYPE_CHECKING, Any

import click

from orthomerge.core.progress import SILENT, Progress
from orthomerge.core.table import Table, plain

if TYPE_CHECKING:
    from orthomerge.analysis.diagnosis import Diagnosis
    from orthomerge.evaluation.metrics import Score

Part = str | Table | Mapping[str, Any] | list[Any]
_EVERY = 5.0  # seconds between lines of progress in a log
_NARROW = 12  # letters: smallest width of a column that wraps


def show(part: Part, *, as_json: bool = False) -> None:
    """Print a part of the output: a text or table for people, or a document for `--json`."""
    if isinstance(part, str | Table) == as_json:
        return
    if isinstance(part, Table):
        _print_table(part)
    else:
        click.echo(part if isinstance(part, str) else json.dumps(part, indent=2, ensure_ascii=False, default=str))


def _print_table(table: Table) -> None:
    """Print a table, with a blank line before a title. Only columns that wrap are narrowed to fit the terminal."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    grid, columns = Grid(box=None, pad_edge=False), zip(table.names, *table.texts, strict=True)
    widths = [max(cell_len(plain(text)) for text in column) for column in columns]
    least = [_NARROW if column.wrap else width for column, width in zip(table.columns, widths, strict=True)]
    for column, width in zip(table.columns, least, strict=True):
        wrap: dict[str, Any] = {"no_wrap": not column.wrap, "overflow": "fold", "min_width": width}
        grid.add_column(Text(plain(column.name)), justify=column.align, **wrap)
    for row in table.texts:
        grid.add_row(*(Text(plain(text)) for text in row))
    width = get_terminal_size().columns
    if table.title:
        click.echo(f"\n{plain(table.title)}")
    Console(width=max(width, sum(least) + 2 * len(least) - 2), highlight=False).print(grid)
    for line in table.note.splitlines():
        click.echo(fill(plain(line), width))


def score_cell(score: Score) -> str:
    return f"{100 * score.value:.1f} ({100 * score.low:.1f}-{100 * score.high:.1f})"


def alignment_lines(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line per task: number of inputs, facts of the aligner, parameters added; then the notes."""
    alignment = manifest["alignment"]
    for task, results in alignment["tasks"].items():
        facts = ", ".join(f"{name} {_short(value)}" for name, value in results["facts"].items()) or "no facts"
        added = results["extra"]["parameters"]
        size = f"{added:,} parameters added" if added else "nothing added"
        yield f"{task}: {alignment['aligner']} on {results['inputs']} inputs of {alignment['split']}; {facts}; {size}"
    for note in manifest["notes"]:
        yield f"note: {note}"


def fit_lines(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield the method and inputs of a fit, and its results except tables."""
    fit = manifest["fit"]
    inputs = ", ".join(f"{task} {facts['inputs']}" for task, facts in fit["tasks"].items())
    yield f"{manifest['method']['name']} on unlabelled inputs of {fit['split']} ({fit['access']}): {inputs}"
    for name, value in fit["facts"].items():
        numbers = value if isinstance(value, Mapping) else {"": value}
        if not any(isinstance(number, Mapping) for number in numbers.values()):
            texts = (f"{key} {_short(number)}".strip() for key, number in numbers.items())
            yield f"  {name.replace('_', ' ')}: {', '.join(texts)}"


def verdict_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield every finding: its title, and its indented text."""
    wrapper = TextWrapper(get_terminal_size().columns, "  ", "  ", break_long_words=False, break_on_hyphens=False)
    for finding in diagnosis.verdict:
        yield f"{click.style(plain(finding.title), bold=True)}\n{wrapper.fill(plain(finding.text))}\n"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Reporter(Progress):
    """Show progress on standard error: a bar on a terminal, else a line per stage and one every few seconds."""

    def __init__(self, bar: Any = None) -> None:
        self._bar, self._prefix = bar, ""
        self._task = None if bar is None else bar.add_task("", total=None)
        self.stage("", None)

    def begin(self, name: str, *, place: int, count: int) -> None:
        self._prefix = f"[{place}/{count}] {name}"
        self.stage("", None)

    def end(self, name: str, *, place: int, count: int, seconds: float, found: bool) -> None:
        self.say(f"[{place}/{count}] {name}: {'found, unchanged' if found else f'done in {seconds:.1f} s'}")

    def stage(self, title: str, total: int | None) -> None:
        self._title = ": ".join(filter(None, (self._prefix, title)))
        self._total, self._done = total or 0, 0
        self._last = time.monotonic()
        if self._bar is not None:
            self._bar.reset(self._task, description=self._title, total=total)
        elif self._title:
            self.say(self._title + (f" {total / 1e6:,.0f} MB" if total else ""))

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if self._bar is not None:
            self._bar.advance(self._task, count)
        elif now - self._last >= _EVERY:
            self._last = now
            self.say(f"{self._title} {self._done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB")

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False)
        else:
            sys.stderr.write(f"{text}\n")


@contextmanager
def shown(*, quiet: bool) -> Iterator[Progress]:
    """Report progress on standard error inside the block, unless `quiet`."""
    if quiet or not sys.stderr.isatty():
        yield SILENT if quiet else Reporter()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True, highlight=False), transient=True) as bar:
        yield Reporter(bar)
