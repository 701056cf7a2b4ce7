"""What commands share: reading NAME=VALUE, and printing documents and tables."""

from __future__ import annotations

import json
from collections.abc import Iterable
from shutil import get_terminal_size
from textwrap import fill
from typing import Any

import typer

from orthomerge.core.errors import RecipeError
from orthomerge.core.table import Table, plain


def pair(text: str, form: str) -> tuple[str, str]:
    """`NAME=VALUE` in two; `form` says in messages what was expected."""
    key, equals, value = text.partition("=")
    if not equals or not key or not value:
        raise RecipeError(f"expected {form}, got {text!r}")
    return key, value


def pairs(texts: list[str], form: str, what: str) -> dict[str, str]:
    """Several `NAME=VALUE`, each with a name of its own; `what` they are is for messages."""
    found = [pair(text, form) for text in texts]
    if len(dict(found)) < len(found):
        raise RecipeError(f"two {what} have the same name; give each {form.partition(' ')[0]} a name of its own")
    return dict(found)


def print_json(document: Any) -> None:
    """One document on standard output."""
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False, default=str))


def print_tables(tables: Iterable[Table]) -> None:
    """Tables for a terminal, with a blank line before each that has a title."""
    width = get_terminal_size().columns
    for table in tables:
        if table.title:
            typer.echo(f"\n{plain(table.title)}")
        header, *rows = table.text(width).split("\n")
        typer.echo("\n".join((typer.style(header, bold=True), *rows)))
        if table.note:
            typer.echo(fill(plain(table.note), width))
