"""Flags from the fields of dataclasses: a command takes a few such groups, and its help has one section per group.

A field is `Annotated[type, Flag("help")]`. `Literal` gives choices, `dict[str, str]` a repeated NAME=PATH (in a union
with `str`: or one PATH), a tuple of numbers a list with commas, a tuple of texts a repeated flag, and a `bool` that is
true by default gets `--no-NAME`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import click

from orthomerge.core.errors import RecipeError, nearest

_PROGRAM = "orthomerge"


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
    """A command of one function whose parameters are groups of flags, and whose docstring is the help.

    `usage` and `examples`: lines without the program's name.
    """

    def __init__(self, function: Callable[..., None], usage: Sequence[str], examples: Sequence[str]) -> None:
        self.function, self.usage, self.examples = function, usage, examples
        self.groups = {name: kind for name, kind in get_type_hints(function).items() if name != "return"}
        self.sections = {kind.__name__: _parameters(kind) for kind in self.groups.values()}
        super().__init__(
            function.__name__,
            callback=self._call,
            params=[parameter for section in self.sections.values() for parameter in section],
            help=function.__doc__,
            context_settings={"help_option_names": ["-h", "--help"]},
        )

    def _call(self, **values: Any) -> None:
        groups = {
            name: kind(**{field.name: values[field.name] for field in fields(kind)})
            for name, kind in self.groups.items()
        }
        self.function(**groups)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one line per form of the command."""
        for line in self.usage:
            formatter.write_usage(_PROGRAM, line, prefix="Usage: " if line == self.usage[0] else "       ")

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write usage, description, examples, then each group of flags."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        formatter.write("\n" + "".join(f"  {_PROGRAM} {line}\n" for line in self.examples))
        for title, section in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([row for each in section if (row := each.get_help_record(ctx)) is not None])


def command(*, usage: Sequence[str], examples: Sequence[str]) -> Callable[[Callable[..., None]], Command]:
    """Make a command of a function."""
    return lambda function: Command(function, usage, examples)


class _Argument(click.Argument):
    """An argument with a line of help."""

    def __init__(self, name: str, *, text: str, **options: Any) -> None:
        super().__init__([name], **options)
        self.help = text

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.metavar or self.human_readable_name, self.help or ""


class _Pairs(click.Option):
    """A repeated NAME=VALUE, as a mapping; of settings with one key the last counts. `or_one`: or one other text."""

    def __init__(self, names: Sequence[str], *, or_one: bool, **options: Any) -> None:
        super().__init__(names, **options)
        self.or_one = or_one

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        texts: tuple[str, ...] = super().process_value(ctx, value) or ()
        if self.or_one and len(texts) == 1 and "=" not in texts[0]:
            return texts[0]
        form = f"{self.opts[-1]} {'TASK=PATH' if self.or_one else self.metavar}"
        pairs = [text.partition("=") for text in texts]
        for text, (name, _, path) in zip(texts, pairs, strict=True):
            if not name or not path:
                raise RecipeError(f"expected {form}, got {text!r}")
        values = {name: path for name, _, path in pairs}
        if len(values) < len(pairs) and self.metavar != "KEY=VALUE":
            raise RecipeError(f"two {form} have the same name; give each a name of its own")
        return values


class _Choice(click.Choice[Any]):
    """A choice that offers the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self.choices:
            return value
        name = "" if param is None else param.metavar if isinstance(param, click.Argument) else param.opts[-1]
        raise RecipeError(f"{name} must be {' | '.join(self.choices)}, got {value!r}; {nearest(value, self.choices)}")


class _Numbers(click.ParamType[tuple[float, ...]]):
    """Numbers with commas between them."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        try:
            return value if isinstance(value, tuple) else tuple(float(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 0.2,0.5,1", param, ctx)


def _parameters(group: type) -> list[click.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [_parameter(field, *get_args(hints[field.name])[:2]) for field in fields(group)]


def _parameter(field: Field[Any], kind: Any, flag: Flag) -> click.Parameter:
    """The argument or option of a field."""
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    first = next(member for member in members if member is not NoneType)
    required = field.default is MISSING and field.default_factory is MISSING
    value = None if field.default is MISSING else field.default
    parts: dict[str, Any] = {"required": required, "metavar": flag.metavar, **_type(first)}
    if flag.positional:
        return _Argument(field.name, text=flag.help, nargs=-1 if parts.pop("multiple", False) else 1, **parts)
    name = flag.name or "--" + field.name.replace("_", "-")
    names = [*filter(None, (flag.short, f"{name}/--no-{name[2:]}" if value is True else name)), field.name]
    shown = flag.default or _shown(value)
    text = f"{flag.help}  [default: {shown}]" if shown else flag.help
    if get_origin(first) is dict:
        return _Pairs(names, or_one=str in members, help=text, **parts)
    return click.Option(names, default=value, help=text, **parts)


def _type(kind: Any) -> dict[str, Any]:
    """How click reads the values of a flag."""
    if get_origin(kind) is Literal:
        return {"type": _Choice(get_args(kind))}
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return {"type": _Numbers()} if item is float else {**_type(item), "multiple": True}
    if get_origin(kind) is dict:
        return {"type": str, "multiple": True}
    return {"is_flag": True} if kind is bool else {"type": kind}


def _shown(value: Any) -> str:
    """A default in words; nothing where none is needed."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "" if value is None or value is False else "yes" if value is True else str(value)
