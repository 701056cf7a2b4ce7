"""The command line reference, from the command line itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
from docs.generator.options import prose, table


def command_tree(app: click.Group) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command with its words; groups are walked."""
    context = click.Context(app)
    for name in app.commands:
        command = app.get_command(context, name)
        if isinstance(command, click.Group):
            yield from (((name, *words), inner) for words, inner in command_tree(command))
        else:
            yield (name,), command


def help_of(command: Any, words: tuple[str, ...]) -> str:
    """The screen of `--help`."""
    with command.make_context(
        " ".join(("orthomerge", *words)), [], resilient_parsing=True, terminal_width=100
    ) as context:
        return str(command.get_help(context))


def cli_page(app: click.Group) -> str:
    """One section per command with its help."""
    commands = list(command_tree(app))
    rows = [
        (f"[`{' '.join(words)}`](#command-{'-'.join(words)})", prose(command.help or "")) for words, command in commands
    ]
    blocks = ["# Command line", table(("command", "what it does"), rows)]
    for words, command in commands:
        blocks += [f"(command-{'-'.join(words)})=", f"## {' '.join(words)}", f"```text\n{help_of(command, words)}\n```"]
    return "\n\n".join(blocks) + "\n"
