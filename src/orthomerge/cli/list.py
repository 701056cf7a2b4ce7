"""The command `list`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import click

from orthomerge.cli.flags import Flag, command
from orthomerge.cli.options import Display
from orthomerge.cli.printing import print_json, print_tables


@dataclass(frozen=True)
class Input:
    """What is listed."""

    kind: Annotated[
        Literal["methods", "aligners", "protocols", "families", "suites"],
        Flag("methods, aligners, protocols, families or suites", "KIND", positional=True),
    ]
    name: Annotated[str | None, Flag("One entry, with its options.", "[NAME]", positional=True)] = None


@command(usage=("list KIND [NAME] [OPTIONS]",), examples=("list methods", "list methods ties", "list aligners --json"))
def list(given: Input, display: Display) -> None:  # noqa: A001 - the name of the command
    """List methods, aligners, protocols, families or suites.

    With a NAME, one entry with its options, defaults and reference.
    """
    from orthomerge.api.list import list as table_of

    table = table_of(given.kind, given.name)
    if display.json:
        print_json(table.json_rows())
        return
    if given.name is None:
        print_tables([table])
        return
    click.echo(table.title)
    for option, kind, default in table.texts:
        click.echo(f"  {option} = {default}  ({kind})")
    click.echo(table.note)
