"""List methods, aligners, protocols, families or suites."""

from __future__ import annotations

from dataclasses import MISSING
from importlib import import_module
from inspect import getdoc
from typing import Any

from orthomerge.core.errors import RecipeError, nearest
from orthomerge.core.schema import describe, find_row, maker_of, schema
from orthomerge.core.table import Table

_TABLES = {
    "methods": "merging.methods:methods",
    "aligners": "alignment.aligners:aligners",
    "protocols": "evaluation.protocols:protocols",
    "families": "models.families:FAMILIES",
    "suites": "suites.table:SUITES",
}


def list(kind: str, name: str | None = None) -> Table:  # noqa: A001 - used as om.list
    """Return a table of methods, aligners, protocols, families or suites, or of the options of one of them."""
    if kind not in _TABLES:
        raise RecipeError(f"unknown kind {kind!r}; {nearest(kind, _TABLES)}")
    module, _, attribute = _TABLES[kind].partition(":")
    rows: Any = getattr(import_module(f"orthomerge.{module}"), attribute)
    rows = rows() if callable(rows) else rows
    singular = "family" if kind == "families" else kind[:-1]
    if name is not None:
        return _options(find_row(rows, name, what=singular), kind)
    second = {"families": "model types", "suites": "needs"}.get(kind, "options")
    cells = ((row.name, row.title, _second(row, kind), _note(row, kind)) for row in rows.values())
    return Table.of("", (singular, "title", second, "note"), cells, left=4, wrap=("title", second))


def _options(row: Any, kind: str) -> Table:
    """Return a table of the options of one entry, with its reference and documentation below."""
    if kind in ("families", "suites"):
        facts = (
            {"model types": row.model_types, "pooling": row.poolings} if kind == "families" else {"tasks": row.tasks}
        )
        cells = [(fact, "list of text", ", ".join(items)) for fact, items in facts.items()]
        return Table.of(f"{row.name}: {row.title}", ("option", "type", "default"), cells, left=3)
    maker = maker_of(row)
    cells = [(name, describe(kind), _default(field)) for name, (kind, field) in schema(maker).items()]
    note = f"{row.reference}\n\n{getdoc(maker) or ''}"
    return Table.of(f"{row.name}: {row.title}", ("option", "type", "default"), cells, left=3, note=note)


def _second(row: Any, kind: str) -> str:
    if kind == "families":
        return ", ".join(row.model_types)
    if kind == "suites":
        return str(row.needs)
    return ", ".join(f"{name}={_default(field)}" for name, (_, field) in schema(maker_of(row)).items())


def _note(row: Any, kind: str) -> str:
    """Describe what an entry needs or adds."""
    if kind in ("families", "suites"):
        return str(row.modality) if kind == "families" else f"{len(row.tasks)} tasks"
    if getattr(row, "fitted", False):
        return "needs inputs"
    return "adds parameters" if getattr(row, "extra", False) else ""


def _default(field: Any) -> str:
    return "" if field.default is MISSING else str(field.default)
