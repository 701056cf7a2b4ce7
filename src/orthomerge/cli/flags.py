"""Commands made from functions: the signature gives the flags, the docstring the help, the yielded parts the output.

A parameter is `Annotated[type, Input("help")]`, or a dataclass of such fields that several commands share. `Literal`
gives choices, a mapping a repeated NAME=PATH (in a union with `str`: or one PATH), a tuple of numbers a list with
commas, a tuple of texts a repeated flag, and a `bool` that is true by default gets `--no-NAME`. A parameter `progress`
is no flag: it shows progress on standard error until the first part is yielded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, is_dataclass
from functools import partial
from inspect import Parameter, signature
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import click

from orthomerge.cli.printing import Part, show, shown
from orthomerge.core.errors import RecipeError, nearest

Parts = Iterator[Part]
_PROGRAM = "orthomerge"
_SECTIONS = ("Input", "How", "Output")  # what a command reads, how it works, what it writes
_DISPLAY = (
    click.Option(["--json"], is_flag=True, help="Print one JSON document."),
    click.Option(["-q", "--quiet"], is_flag=True, help="Print no progress."),
    click.Option(["-v", "--verbose"], is_flag=True, expose_value=False, help="Print the traceback of an error."),
)


@dataclass(frozen=True)
class Flag:
    """Help and names of a parameter on the command line. `section`: that of the help screen.

    `metavar`: placeholder of the value. `short`: a second name of one letter. `name`: the long name, if it differs from
    the parameter's. `default`: the default in words, if the value does not tell. `positional`: not a flag.
    """

    section: str
    help: str
    metavar: str | None = None
    short: str = ""
    name: str = ""
    default: str = ""
    positional: bool = False


Input, How, Output = (partial(Flag, section) for section in _SECTIONS)


class Command(click.Command):
    """Command that calls a function. `usage` and `examples`: lines without the program's name."""

    def __init__(self, function: Callable[..., Parts], examples: Sequence[str], usage: Sequence[str]) -> None:
        self.function, self.examples = function, examples
        self.sections: dict[str, list[click.Parameter]] = {section: [] for section in _SECTIONS}
        self.groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
        parameters = _parameters(function)
        self.reports = parameters.pop("progress", None) is not None
        for name, (kind, default) in parameters.items():
            fields = {name: (kind, default)}
            if isinstance(kind, type) and is_dataclass(kind):
                fields = _parameters(kind)
                self.groups[name] = kind, list(fields)
            for field, (annotated, value) in fields.items():
                type_, flag = get_args(annotated)
                self.sections[flag.section].append(_option(field, type_, flag, value))
        self.sections["Output"] += _DISPLAY
        super().__init__(
            function.__name__,
            callback=self._call,
            params=[option for section in self.sections.values() for option in section],
            help=function.__doc__,
            context_settings={"help_option_names": ["-h", "--help"]},
        )
        arguments = [str(one.metavar) for one in self.params if isinstance(one, click.Argument)]
        required = [f"{one.opts[-1]} {one.metavar}" for one in self.params if one.opts[-1][0] == "-" and one.required]
        self.usage = usage or [" ".join((function.__name__, *arguments, *required, "[OPTIONS]"))]

    def _call(self, *, json: bool, quiet: bool, **values: Any) -> None:
        for name, (group, fields) in self.groups.items():
            values[name] = group(**{field: values.pop(field) for field in fields})
        with ExitStack() as stack:
            if self.reports:
                values["progress"] = stack.enter_context(shown(quiet=quiet or json))
            for part in self.function(**values):
                stack.close()  # a bar ends before anything is printed
                show(part, as_json=json)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one line per form of the command."""
        for line in self.usage:
            formatter.write_usage(_PROGRAM, line, prefix="Usage: " if line == self.usage[0] else "       ")

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write usage, description, examples, then each section of flags."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        formatter.write("\n" + "".join(f"  {_PROGRAM} {line}\n" for line in self.examples))
        for title, section in self.sections.items():
            rows = [row for option in section if (row := option.get_help_record(ctx)) is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def command(*examples: str, usage: Sequence[str] = ()) -> Callable[[Callable[..., Parts]], Command]:
    """Decorate a function to make it a command. `usage`: its forms, if they are more than what it requires."""
    return lambda function: Command(function, examples, usage)


class _Argument(click.Argument):
    def __init__(self, name: str, *, text: str, **options: Any) -> None:
        super().__init__([name], **options)
        self.help = text

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.metavar or self.human_readable_name, self.help or ""


class _Choice(click.Choice[Any]):
    """Choice whose error names the nearest alternative."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self.choices:
            return value
        name = "" if param is None else param.metavar if isinstance(param, click.Argument) else param.opts[-1]
        raise RecipeError(f"{name} must be {' | '.join(self.choices)}, got {value!r}; {nearest(value, self.choices)}")


def _pairs(ctx: click.Context, option: click.Parameter, texts: Sequence[str]) -> Mapping[str, str] | str:
    """Parse a repeated NAME=VALUE; the last of equal KEYs wins. A PATH may be one text without a name."""
    if option.metavar == "PATH" and len(texts) == 1 and "=" not in texts[0]:
        return texts[0]
    form = f"{option.opts[-1]} {'TASK=PATH' if option.metavar == 'PATH' else option.metavar}"
    values: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value:
            raise RecipeError(f"expected {form}, got {text!r}")
        if name in values and option.metavar != "KEY=VALUE":
            raise RecipeError(f"two {form} have the same name; give each a name of its own")
        values[name] = value
    return values


def _numbers(ctx: click.Context, option: click.Parameter, text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a list of numbers such as 0.2,0.5,1", ctx, option) from error


def _parameters(function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Return type and default of the parameters of a function, or of the fields of a dataclass."""
    hints = get_type_hints(function, include_extras=True)
    return {name: (hints[name], parameter.default) for name, parameter in signature(function).parameters.items()}


def _option(name: str, kind: Any, flag: Flag, default: Any) -> click.Parameter:
    required = default is Parameter.empty
    options: dict[str, Any] = {"required": required, "metavar": flag.metavar, **_reading(kind)}
    if flag.positional:
        nargs = -1 if options.pop("multiple", False) else 1
        return _Argument(name, text=flag.help, nargs=nargs, **options)
    value = None if required else default
    long = flag.name or "--" + name.replace("_", "-")
    names = [*filter(None, (flag.short, f"{long}/--no-{long[2:]}" if value is True else long)), name]
    words = flag.default or _shown(value)
    text = f"{flag.help}  [default: {words}]" if words else flag.help
    return click.Option(names, default=value, help=text, **options)


def _reading(kind: Any) -> dict[str, Any]:
    if get_origin(kind) in (Union, UnionType):  # with `None`, or a mapping or `str`
        kind = get_args(kind)[0]
    if get_origin(kind) is Mapping:
        return {"multiple": True, "callback": _pairs}
    if get_origin(kind) is Literal:
        return {"type": _Choice(get_args(kind))}
    if kind == tuple[float, ...]:
        return {"callback": _numbers}
    if get_origin(kind) is tuple:
        return {"multiple": True, **_reading(get_args(kind)[0])}
    return {"is_flag": True} if kind is bool else {"type": kind}


def _shown(value: Any) -> str:
    """Format a default value; empty if it need not be shown."""
    if value is None or isinstance(value, bool):
        return "yes" if value else ""
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
