"""Tables of named makers: methods, protocols, aligners. Written by hand, open to plug-ins, imported row by row.

A maker is a dataclass, or a function that fixes some fields of one: what it takes are the options of its row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeVar, cast

from orthomerge.core.errors import RecipeError, nearest
from orthomerge.core.schema import build


class Named(Protocol):
    """A row: a name, and its maker as `module:Class` or `module:function`."""

    @property
    def name(self) -> str: ...

    @property
    def maker(self) -> str: ...


Row = TypeVar("Row", bound=Named)


def with_plugins(rows: Mapping[str, Row], kind: type[Row], *, group: str) -> Mapping[str, Row]:
    """Our rows, then those of installed plug-ins; a plug-in cannot take a name that exists."""
    every = dict(rows)
    for entry in entry_points(group=group):
        row = entry.load()
        if not isinstance(row, kind) or row.name in every:
            raise RecipeError(f"the plug-in {entry.value!r} must be a Row with a name of its own; update or remove it")
        every[row.name] = row
    return every


def find_row(rows: Mapping[str, Row], name: str, *, what: str) -> Row:
    """The row of a name; an unknown one offers the nearest."""
    if name not in rows:
        raise RecipeError(f"unknown {what} {name!r}; {nearest(name, rows)}")
    return rows[name]


def maker_of(row: Named) -> Callable[..., Any]:
    """The dataclass or function behind a row."""
    module, _, name = row.maker.partition(":")
    return cast("Callable[..., Any]", getattr(import_module(module), name))


def instance_of(row: Named, options: Mapping[str, Any], *, what: str) -> Any:
    """An instance with its options, strictly checked."""
    return build(maker_of(row), options, where=f"{what} {row.name}")
