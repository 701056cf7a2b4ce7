from typing import Annotated, Literal

import orthomerge as om
from orthomerge.cli.flags import Input, Parts, command

_Kind = Literal["methods", "aligners", "protocols", "families", "suites"]


@command("list methods", "list methods ties", "list aligners --json")
def list(  # noqa: A001 - the name of the command
    *,
    kind: Annotated[_Kind, Input("methods, aligners, protocols, families or suites", "KIND", positional=True)],
    name: Annotated[str | None, Input("Show one entry with its options.", "[NAME]", positional=True)] = None,
) -> Parts:
    """List methods, aligners, protocols, families or suites.

    With NAME, show one entry with its options, defaults and reference.
    """
    table = om.list(kind, name)
    yield table.json_rows()
    yield table
