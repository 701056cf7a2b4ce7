"""Flags from the fields of dataclasses: a command takes a few such groups, and its help has one section per group.

A field is `Annotated[type, Flag("help")]`. `Literal` gives choices, `dict[str, str]` a repeated NAME=PATH, a tuple of
numbers a list with commas, a tuple of texts a repeated flag, and a `bool` that is true by default gets `--no-NAME`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import click

from orthomerge.core.errors import RecipeError, nearest

_PROGRAM = "orthomerge"
_NUMBERS = (int, float)


@dataclass(frozen=True)
class Flag:
    """How a field is written on the command line.

    `metavar`: the placeholder of its value. `short`: a second name of one letter. `name`: the long name, if it is not
    that of the field. `default`: in words, where the value does not say it. `positional`: an argument.
    """

    help: str
    metavar: str | None = None
    short: str = ""
    name: str = ""
    default: str = ""
    positional: bool = False


class Command(click.Command):
    """A command of one function whose parameters are groups of flags.

    The function's docstring is its help; `usage` and `examples` are lines without the program's name.
    """

    def __init__(self, function: Callable[..., None], usage: Sequence[str], examples: Sequence[str]) -> None:
        hints = get_type_hints(function)
        self.groups = {name: kind for name, kind in hints.items() if name != "return"}
        self.sections = {kind.__name__: _parameters(kind) for kind in self.groups.values()}
        self.usage, self.examples = usage, examples
        super().__init__(
            function.__name__,
            callback=self._call,
            params=[parameter for section in self.sections.values() for parameter in section],
            help=function.__doc__,
            context_settings={"help_option_names": ["-h", "--help"]},
        )
        self._function = function

    def _call(self, **values: Any) -> None:
        arguments = {name: kind(**_values(kind, values)) for name, kind in self.groups.items()}
        self._function(**arguments)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one line per form of the command."""
        for number, line in enumerate(self.usage):
            prefix = "       " if number else None
            formatter.write_usage(_PROGRAM, line, prefix=prefix)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write usage, description, examples, then each group of flags."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        formatter.write("\n" + "".join(f"  {_PROGRAM} {line}\n" for line in self.examples))
        for title, section in self.sections.items():
            with formatter.section(title):
                rows = (parameter.get_help_record(ctx) for parameter in section)
                formatter.write_dl([row for row in rows if row is not None])


def command(*, usage: Sequence[str], examples: Sequence[str]) -> Callable[[Callable[..., None]], Command]:
    """Make a command of a function."""
    return lambda function: Command(function, usage, examples)


def named(texts: Sequence[str], form: str) -> dict[str, str]:
    """Several `NAME=VALUE`; `form` says in messages what was expected. Of settings with one key the last counts."""
    pairs = [text.partition("=") for text in texts]
    for text, (name, _, value) in zip(texts, pairs, strict=True):
        if not name or not value:
            raise RecipeError(f"expected {form}, got {text!r}")
    values = {name: value for name, _, value in pairs}
    if len(values) < len(pairs) and not form.startswith("--set"):
        raise RecipeError(f"two {form} have the same name; give each a name of its own")
    return values


class _Argument(click.Argument):
    """An argument with a line of help, shown as it is written in the usage."""

    def __init__(self, name: str, *, text: str, **options: Any) -> None:
        super().__init__([name], **options)
        self.help = text

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.metavar or self.human_readable_name, self.help or ""


class _Choice(click.Choice[Any]):
    """A choice that offers the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self.choices:
            return value
        name = param.make_metavar(ctx) if isinstance(param, click.Argument) and ctx else param.opts[-1] if param else ""
        raise RecipeError(f"{name} must be {' | '.join(self.choices)}, got {value!r}; {nearest(value, self.choices)}")


class _Numbers(click.ParamType[tuple[float, ...]]):
    """Numbers with commas between them."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return tuple(float(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 0.2,0.5,1", param, ctx)


def _parameters(group: type) -> list[click.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [_parameter(field, *get_args(hints[field.name])[:2]) for field in fields(group)]


def _parameter(field: Field[Any], kind: Any, flag: Flag) -> click.Parameter:
    """The argument or option of a field."""
    kinds, required = _kinds(kind), field.default is MISSING and field.default_factory is MISSING
    value = None if field.default is MISSING else field.default
    parts = _type(kinds[0])
    if flag.positional:
        count = -1 if parts.pop("multiple", False) else 1
        return _Argument(field.name, text=flag.help, nargs=count, required=required, metavar=flag.metavar, **parts)
    name = flag.name or "--" + field.name.replace("_", "-")
    if value is True:
        name += f"/--no-{name[2:]}"
    shown = flag.default or _shown(value)
    return click.Option(
        [*filter(None, (flag.short, name)), field.name],
        help=f"{flag.help}  [default: {shown}]" if shown else flag.help,
        required=required,
        default=value,
        metavar=flag.metavar,
        **parts,
    )


def _shown(value: Any) -> str:
    """A default in words; nothing where none is needed."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else ""
    return "" if value is None else str(value)


def _type(kind: Any) -> dict[str, Any]:
    """How click reads the values of a flag."""
    if kind is bool:
        return {"is_flag": True}
    if get_origin(kind) is Literal:
        return {"type": _Choice(get_args(kind))}
    if get_origin(kind) is tuple and get_args(kind)[0] in _NUMBERS:
        return {"type": _Numbers()}
    if get_origin(kind) is tuple:
        return {**_type(get_args(kind)[0]), "multiple": True}
    return {"type": str, "multiple": True} if get_origin(kind) is dict else {"type": kind}


def _values(group: type, values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a group, from what click has parsed; a mapping is still a list of texts there."""
    hints = get_type_hints(group, include_extras=True)
    fitting = {}
    for field in fields(group):
        kind, flag = get_args(hints[field.name])[:2]
        fitting[field.name] = value = values[field.name]
        kinds = _kinds(kind)
        if isinstance(value, tuple) and get_origin(kinds[0]) is dict:
            folder = str in kinds and len(value) == 1 and "=" not in value[0]
            form = f"{flag.name or '--' + field.name} {'TASK=PATH' if str in kinds else flag.metavar}"
            fitting[field.name] = value[0] if folder else named(value, form)
    return fitting


def _kinds(kind: Any) -> list[Any]:
    """The members of a union, without None."""
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return [member for member in members if member is not NoneType]
