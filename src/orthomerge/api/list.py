from collections.abc import Sequence
from dataclasses import MISSING
from importlib import import_module
from inspect import getdoc
from typing import Any

from orthomerge.core.schema import describe, find_row, maker_of, schema
from orthomerge.core.table import Table

# Name of one entry, title of the second column, and place of the table.
_TABLES = {
    "methods": ("method", "options", "merging.methods:methods"),
    "aligners": ("aligner", "options", "alignment.aligners:aligners"),
    "protocols": ("protocol", "options", "evaluation.protocols:protocols"),
    "families": ("family", "model types", "models.families:FAMILIES"),
    "suites": ("suite", "needs", "suites.table:SUITES"),
}


def list(kind: str, name: str | None = None) -> Table:  # noqa: A001 - used as om.list
    """Return a table of methods, aligners, protocols, families or suites, or of the options of one of them."""
    singular, second, place = find_row(_TABLES, kind, what="kind")
    module, _, attribute = place.partition(":")
    rows: Any = getattr(import_module(f"orthomerge.{module}"), attribute)
    rows = rows() if callable(rows) else rows
    if name is None:
        cells = ((row.name, row.title, *_summary(row, kind)) for row in rows.values())
        return Table.of("", (singular, "title", second, "note"), cells, left=4, wrap=("title", second))
    row = find_row(rows, name, what=singular)
    note = "" if kind in ("families", "suites") else f"{row.reference}\n\n{getdoc(maker_of(row)) or ''}"
    return Table.of(f"{row.name}: {row.title}", ("option", "type", "default"), _options(row, kind), left=3, note=note)


def _summary(row: Any, kind: str) -> tuple[str, str]:
    """Return options, model types or requirements of an entry, and what it needs or adds."""
    if kind == "families":
        return ", ".join(row.model_types), row.modality
    if kind == "suites":
        return row.needs, f"{len(row.tasks)} tasks"
    adds = "adds parameters" if getattr(row, "extra", False) else ""
    options = ", ".join(f"{name}={default}" for name, _, default in _options(row, kind))
    return options, "needs inputs" if getattr(row, "fitted", False) else adds


def _options(row: Any, kind: str) -> Sequence[tuple[str, str, str]]:
    if kind == "families":
        facts = {"model types": row.model_types, "pooling": row.poolings}
    elif kind == "suites":
        facts = {"tasks": row.tasks}
    else:
        return [
            (name, describe(type_), "" if field.default is MISSING else str(field.default))
            for name, (type_, field) in schema(maker_of(row)).items()
        ]
    return [(fact, "list of text", ", ".join(items)) for fact, items in facts.items()]
