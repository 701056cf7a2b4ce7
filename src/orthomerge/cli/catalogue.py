"""The tables of what can be chosen by name, listed: `methods` and `aligners`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING
from inspect import getdoc
from typing import Any, Protocol

import typer

from orthomerge.cli.printing import print_json, print_tables
from orthomerge.core.schema import describe, schema
from orthomerge.core.table import Table

_MARKS = {"extra": "adds parameters", "fitted": "needs inputs"}


class _Row(Protocol):
    """What the rows of all tables have."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def reference(self) -> str: ...


def methods(name: str | None, *, as_json: bool) -> None:
    from orthomerge.core.rows import maker_of
    from orthomerge.merging.methods import find_method
    from orthomerge.merging.methods import methods as table

    rows = [find_method(name)] if name is not None else table().values()
    _show(
        "method",
        [(row, maker_of(row), {"base": row.base, "fitted": row.fitted}) for row in rows],
        one=name is not None,
        as_json=as_json,
    )


def aligners(name: str | None, *, as_json: bool) -> None:
    from orthomerge.alignment.aligners import aligner_class, find_aligner
    from orthomerge.alignment.aligners import aligners as table

    rows = [find_aligner(name)] if name is not None else table().values()
    entries = [(row, aligner_class(row), {"extra": row.extra}) for row in rows]
    _show("aligner", entries, one=name is not None, as_json=as_json)


def _show(
    kind: str, entries: Sequence[tuple[_Row, Callable[..., Any], Mapping[str, Any]]], *, one: bool, as_json: bool
) -> None:
    """Rows with the maker behind each and what they say besides: a table of all, or `one` in full."""
    documents: list[dict[str, Any]] = [
        {"name": row.name, "title": row.title, "reference": row.reference, **about, "options": _options(maker)}
        for row, maker, about in entries
    ]
    if as_json:
        print_json(documents)
    elif one:
        row, maker, _ = entries[0]
        typer.echo(f"{row.name}: {row.title}\n{row.reference}\n")
        for option in documents[0]["options"]:
            typer.echo(f"  {option['name']} = {option['default']}  ({option['type']})")
        typer.echo(f"\n{getdoc(maker) or ''}")
    else:
        marks = [", ".join(word for key, word in _MARKS.items() if document.get(key)) for document in documents]
        columns = (kind, "title", "options", *([""] if any(marks) else []))
        rows = []
        for document, mark in zip(documents, marks, strict=True):
            options = ", ".join(f"{option['name']}={option['default']}" for option in document["options"])
            rows.append((document["name"], document["title"], options, *([mark] if any(marks) else [])))
        print_tables([Table.of("", columns, rows, left=4, wrap=("title", "options"))])


def _options(maker: Callable[..., Any]) -> list[dict[str, Any]]:
    return [
        {"name": name, "type": describe(kind), "default": None if field.default is MISSING else field.default}
        for name, (kind, field) in schema(maker).items()
    ]
