"""The command `list`."""

from __future__ import annotations

from typing import Annotated, Literal

import click

import orthomerge as om
from orthomerge.cli.flags import Input, command
from orthomerge.cli.options import Display
from orthomerge.cli.printing import print_json, print_tables

_KINDS = "methods, aligners, protocols, families or suites"
_Kind = Literal["methods", "aligners", "protocols", "families", "suites"]


@command(usage=("list KIND [NAME] [OPTIONS]",), examples=("list methods", "list methods ties", "list aligners --json"))
def list(  # noqa: A001 - the name of the command
    *,
    kind: Annotated[_Kind, Input(_KINDS, "KIND", positional=True)],
    name: Annotated[str | None, Input("Show one entry with its options.", "[NAME]", positional=True)] = None,
    display: Display,
) -> None:
    """List methods, aligners, protocols, families or suites.

    With NAME, show one entry with its options, defaults and reference.
    """
    table = om.list(kind, name)
    if display.json:
        print_json(table.json_rows())
        return
    if name is None:
        print_tables([table])
        return
    click.echo(table.title)
    for option, type_, default in table.texts:
        click.echo(f"  {option} = {default}  ({type_})")
    click.echo(table.note)
