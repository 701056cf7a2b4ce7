"""Documents, tables and messages of commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, Any

import click

from orthomerge.core.table import Table, plain

if TYPE_CHECKING:
    from orthomerge.analysis.diagnosis import Diagnosis
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


def print_alignment(manifest: Mapping[str, Any]) -> None:
    """One line per task: number of inputs, facts of the aligner, and parameters added."""
    about = manifest["alignment"]
    for task, results in about["tasks"].items():
        facts = ", ".join(f"{name} {_shown(value)}" for name, value in results["facts"].items()) or "no facts"
        added = results["extra"]["parameters"]
        grown = f"{added:,} parameters added" if added else "nothing added"
        click.echo(f"{task}: {about['aligner']} on {results['inputs']} inputs of {about['split']}; {facts}; {grown}")
    for note in manifest["notes"]:
        click.echo(f"note: {note}")


def print_fit(manifest: Mapping[str, Any]) -> None:
    """What was fitted on which inputs, and its results; those that are tables stay in the manifest."""
    about = manifest["fit"]
    inputs = ", ".join(f"{task} {facts['inputs']}" for task, facts in about["tasks"].items())
    click.echo(f"{manifest['method']['name']} on unlabelled inputs of {about['split']} ({about['access']}): {inputs}")
    for name, value in about["facts"].items():
        numbers = value if isinstance(value, Mapping) else {"": value}
        if not any(isinstance(number, Mapping) for number in numbers.values()):
            texts = (f"{key} {_shown(number)}".strip() for key, number in numbers.items())
            click.echo(f"  {name.replace('_', ' ')}: {', '.join(texts)}")


def print_verdict(diagnosis: Diagnosis) -> None:
    """Every finding under its title."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False)
    for finding in diagnosis.verdict:
        console.print(Text(finding.title, style="bold"))
        console.print(Padding(Text(finding.text), (0, 0, 1, 2)))


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
