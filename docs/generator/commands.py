"""The command line reference, from the Typer app itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from docs.generator.docstrings import prose
from docs.generator.types import table


def command_tree(app: typer.Typer) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with its words; groups are walked, not given."""

    def walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        if hasattr(command, "commands"):
            for name, inner in command.commands.items():
                yield from walk(inner, (*words, name))
        else:
            yield words, command

    yield from walk(typer.main.get_command(app), ())


def find_command(app: typer.Typer, words: list[str]) -> tuple[Any, list[str]]:
    """The command that a line means, and the words that are left for it; KeyError if there is none."""
    for path, command in command_tree(app):
        if tuple(words[: len(path)]) == path:
            return command, words[len(path) :]
    raise KeyError(" ".join(words[:2]))


def cli_page(app: typer.Typer) -> str:
    """One section a command: what it does, how it is called, arguments and options."""
    root = typer.main.get_command(app)
    found = list(command_tree(app))
    index = [(f"[`{' '.join(words)}`](#{_anchor(words)})", prose(command.help or "")) for words, command in found]
    text = [
        "# Command line",
        f"{prose(root.help or '')} `orthomerge COMMAND --help` says the same.",
        table(("command", "what it does"), index),
        prose(root.epilog or ""),
    ]
    for words, command in found:
        text += [f"({_anchor(words)})=", f"## {' '.join(words)}", prose(command.help or "")]
        text.append(f"```text\n{_usage(words, command)}\n```")
        rows = [
            (_signs(one), _meaning(one), _default(one)) for one in command.params if not getattr(one, "hidden", False)
        ]
        text.append(table(("argument or option", "meaning", "default"), rows) if rows else "")
    return "\n\n".join(filter(None, text)) + "\n"


def _anchor(words: tuple[str, ...]) -> str:
    return "command-" + "-".join(words)


def _usage(words: tuple[str, ...], command: Any) -> str:
    parts = ["orthomerge", *words]
    for one in command.params:
        if one.param_type_name == "argument":
            name = one.metavar or one.name.upper()
            parts.append(name if one.required or name.startswith("[") else f"[{name}]")
        elif one.required:
            parts.append(f"{one.opts[0]} {_holder(one)}{' ...' if one.multiple else ''}")
    return " ".join([*parts, "[OPTIONS]"])


def _holder(one: Any) -> str:
    return str(one.metavar or str(one.name).upper())


def _signs(one: Any) -> str:
    if one.param_type_name == "argument":
        return f"`{(one.metavar or one.name.upper()).strip('[]').replace(']...', '')}`"
    held = "" if getattr(one, "is_flag", False) else f" {one.metavar}" if one.metavar else ""
    return ", ".join(f"`{sign}{held}`" for sign in (*one.opts, *one.secondary_opts))


def _meaning(one: Any) -> str:
    return prose(getattr(one, "help", None) or "")


def _default(one: Any) -> str:
    if one.required:
        return "*required*"
    value = one.default() if callable(one.default) else one.default
    return "" if value in (None, False, (), []) else f"`{value}`"
