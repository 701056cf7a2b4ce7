"""Documents, tables and messages of commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, Any

import click

from orthomerge.core.table import Table, plain

if TYPE_CHECKING:
    from orthomerge.evaluation.metrics import Score


def print_json(document: Any) -> None:
    """One document on standard output."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False, default=str))


def print_tables(tables: Iterable[Table]) -> None:
    """Tables for a terminal, with a blank line before each that has a title."""
    width = get_terminal_size().columns
    for table in tables:
        if table.title:
            click.echo(f"\n{plain(table.title)}")
        header, *rows = table.text(width).split("\n")
        click.echo("\n".join((click.style(header, bold=True), *rows)))
        if table.note:
            click.echo(fill(plain(table.note), width))


def print_progress(text: str) -> None:
    """A line on standard error."""
    sys.stderr.write(f"{text}\n")


def score_cell(score: Score) -> str:
    """A score in percent with its interval."""
    return f"{100 * score.value:.1f} ({100 * score.low:.1f}-{100 * score.high:.1f})"
