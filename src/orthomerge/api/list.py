"""List what can be chosen by name: methods, aligners, protocols, families, suites."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING
from inspect import getdoc
from typing import Any, Literal, get_args

from orthomerge.core.errors import RecipeError, nearest
from orthomerge.core.rows import Named, find_row, maker_of
from orthomerge.core.schema import describe, schema
from orthomerge.core.table import Table

Kind = Literal["methods", "aligners", "protocols", "families", "suites"]


def list(kind: Kind, name: str | None = None) -> Table:  # noqa: A001 - the verb of the library, used as om.list
    """A table of what can be chosen by name, or of the options of one entry."""
    if kind not in get_args(Kind):
        raise RecipeError(f"unknown kind {kind!r}; {nearest(kind, get_args(Kind))}")
    if kind == "families":
        return _families(name)
    if kind == "suites":
        return _suites(name)
    rows: Any
    if kind == "methods":
        from orthomerge.merging.methods import methods

        rows = methods()
    elif kind == "aligners":
        from orthomerge.alignment.aligners import aligners

        rows = aligners()
    else:
        from orthomerge.evaluation.protocols import protocols

        rows = protocols()
    if name is not None:
        return _options(find_row(rows, name, what=kind[:-1]))
    columns = (kind[:-1], "title", "options", "note")
    cells = ((row.name, row.title, _written(maker_of(row)), _mark(row)) for row in rows.values())
    return Table.of("", columns, cells, left=4, wrap=("title", "options"))


def _options(row: Any) -> Table:
    """The options of one entry, with its reference and its documentation below."""
    maker = maker_of(row)
    cells = (
        (name, describe(kind), "required" if field.default is MISSING else str(field.default))
        for name, (kind, field) in schema(maker).items()
    )
    note = f"{row.reference}\n\n{getdoc(maker) or ''}"
    return Table.of(f"{row.name}: {row.title}", ("option", "type", "default"), cells, left=3, note=note)


def _written(maker: Callable[..., Any]) -> str:
    options = schema(maker).items()
    return ", ".join(f"{name}={'' if field.default is MISSING else field.default}" for name, (_, field) in options)


def _mark(row: Named) -> str:
    """What a user must know before choosing it."""
    if getattr(row, "fitted", False):
        return "needs inputs"
    return "adds parameters" if getattr(row, "extra", False) else ""


def _families(name: str | None) -> Table:
    from orthomerge.models.families import FAMILIES, family

    rows = FAMILIES.values() if name is None else [family(name)]
    columns = ("family", "title", "reads", "pooling", "model_type")
    cells = ((row.name, row.title, row.modality, ", ".join(row.poolings), ", ".join(row.model_types)) for row in rows)
    return Table.of("", columns, cells, left=5, wrap=("title", "pooling", "model_type"))


def _suites(name: str | None) -> Table:
    from orthomerge.suites.table import SUITES, Row, find_suite

    rows: Iterable[Row] = SUITES.values() if name is None else [find_suite(name)]
    cells = (
        (row.name, row.title, str(len(row.tasks)) if name is None else ", ".join(row.tasks), row.needs) for row in rows
    )
    return Table.of("", ("suite", "title", "tasks", "needs"), cells, left=4, wrap=("title", "tasks", "needs"))
