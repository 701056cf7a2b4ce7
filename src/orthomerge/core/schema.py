"""Build dataclasses from plain data, strictly; fields of a class or parameters of a function are its schema.

Supported are scalars, literals, unions, tuples of one type, string-keyed mappings, and dataclasses. Tables of named
makers (methods, protocols, aligners) are written by hand, extended by plug-ins, and imported row by row.
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from importlib import import_module
from importlib.metadata import entry_points
from inspect import Parameter, signature
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from orthomerge.core.errors import RecipeError, nearest

Made = TypeVar("Made")


@dataclass(frozen=True)
class TableRow:
    """A row of a table. `maker`: `module:Class` or `module:function`, imported when first used."""

    name: str
    maker: str
    title: str
    reference: str


Row = TypeVar("Row", bound=TableRow)


def build(maker: Callable[..., Made], data: object, *, where: str) -> Made:
    """Call a dataclass or function with strictly checked options. `where`: source of the options, for messages."""
    if not isinstance(data, Mapping):
        raise RecipeError(f"{where} must be a mapping of options, got {_shown(data)}")
    options = schema(maker)
    for key in data:
        if key not in options:
            raise RecipeError(f"{where}: unknown option {str(key)!r}; {nearest(str(key), options)}")
    for name, (_, option) in options.items():
        if name not in data and option.default is MISSING and option.default_factory is MISSING:
            raise RecipeError(f"{where}: {name!r} is missing")
    values = {
        name: _convert(data[name], kind, f"{where}: {name!r}") for name, (kind, _) in options.items() if name in data
    }
    return maker(**values)


def schema(maker: Callable[..., Any]) -> dict[str, tuple[Any, Field[Any]]]:
    """Return type and field of every option of a dataclass, or of a function that makes one, in order."""
    hints = get_type_hints(maker)
    if is_dataclass(maker):
        return {option.name: (hints[option.name], option) for option in fields(maker) if option.init}
    defaults = {name: option.default for name, option in signature(maker).parameters.items()}
    return {
        name: (hints[name], field() if default is Parameter.empty else field(default=default))
        for name, default in defaults.items()
    }


def describe(kind: Any) -> str:
    """Describe a type in the words of a recipe: `list of text`."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(part) for part in parts)
    if origin is Literal:
        return " | ".join(map(str, parts))
    if origin is tuple:
        return f"list of {describe(parts[0])}"
    if origin in (dict, Mapping):
        return f"mapping to {describe(parts[1])}"
    words = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "nothing"}
    return words.get(kind, "mapping of options" if is_dataclass(kind) else "anything")


def _convert(value: Any, kind: Any, where: str) -> Any:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _convert_union(value, kind, where)
    if origin is not None:
        return _convert_generic(value, kind, where)
    if is_dataclass(kind) and isinstance(kind, type):
        return value if isinstance(value, kind) else build(kind, value, where=where)
    if kind in (Any, object) or type(value) is kind or (kind is str and isinstance(value, str)):
        return value
    if kind is float and type(value) is int and abs(value) < 2**1000:
        return float(value)
    raise RecipeError(f"{where} must be {describe(kind)}, got {_shown(value)}")


def _convert_generic(value: Any, kind: Any, where: str) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal and value in parts:
        return value
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_convert(item, parts[0], f"{where} item {place}") for place, item in enumerate(value, 1))
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):  # YAML parses `no`, `on`, 007 and 1e3 as other types
                raise RecipeError(f"{where}: the name {_shown(key)} must be text; write it in quotes")
        return {key: _convert(item, parts[1], f"{where}: {key!r}") for key, item in value.items()}
    hint = f"; {nearest(str(value), map(str, parts))}" if origin is Literal else ""
    raise RecipeError(f"{where} must be {describe(kind)}, got {_shown(value)}{hint}")


def _convert_union(value: Any, kind: Any, where: str) -> Any:
    last: RecipeError | None = None
    for part in get_args(kind):
        try:
            return _convert(value, part, where)
        except RecipeError as error:
            # The error of a nested mapping is more precise than one about the union.
            last = error if is_dataclass(part) and isinstance(value, Mapping) else last
    raise last or RecipeError(f"{where} must be {describe(kind)}, got {_shown(value)}")


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        return f"a very large {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def with_plugins(rows: Mapping[str, Row], kind: type[Row], *, group: str) -> Mapping[str, Row]:
    """Add rows of installed plug-ins; they cannot replace existing names."""
    extended = dict(rows)
    for entry in entry_points(group=group):
        row = entry.load()
        if not isinstance(row, kind) or row.name in extended:
            raise RecipeError(f"the plug-in {entry.value!r} must be a Row with a name of its own; update or remove it")
        extended[row.name] = row
    return extended


def find_row(rows: Mapping[str, Made], name: str, *, what: str) -> Made:
    """Return a row of any table by name; the error for an unknown name suggests the nearest."""
    if name not in rows:
        raise RecipeError(f"unknown {what} {name!r}; {nearest(name, rows)}")
    return rows[name]


def maker_of(row: TableRow) -> Callable[..., Any]:
    """Import the dataclass or function of a row."""
    module, _, name = row.maker.partition(":")
    return cast("Callable[..., Any]", getattr(import_module(module), name))


def instance_of(row: TableRow, options: Mapping[str, Any], *, what: str) -> Any:
    """Build an instance from strictly checked options."""
    return build(maker_of(row), options, where=f"{what} {row.name}")
