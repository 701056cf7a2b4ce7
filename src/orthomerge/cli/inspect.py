"""The command `inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import click

import orthomerge as om
from orthomerge.cli.flags import Input, command
from orthomerge.cli.options import Display
from orthomerge.cli.printing import print_json


@command(usage=("inspect PATH [OPTIONS]",), examples=("inspect topic", "inspect merged --verify"))
def inspect(
    *,
    path: Annotated[str, Input("Folder, file, adapter, hub id or merged model.", "PATH", positional=True)],
    headers: Annotated[bool, Input("Read headers only: no hashes, no count of NaN.")] = False,
    verify: Annotated[bool, Input("Compare every file of a merged model with its recorded hash.")] = False,
    display: Display,
) -> None:
    """Describe a checkpoint or a merged model.

    Prints family, tensors, dtypes, head and labels, hashes, and the count of NaN.
    """
    document = om.inspect(path, headers=headers, verify=verify)
    if display.json:
        print_json(document)
    elif verify:
        click.echo(f"{path}: every file is as it was written")
    else:
        _print(document)


def _print(document: Mapping[str, Any]) -> None:
    for key, value in document.items():
        if key == "tensors":
            click.echo(f"tensors: {len(value)}")
            for name, tensor in value.items():
                click.echo(f"  {name}  {tensor['dtype']} {tuple(tensor['shape'])}")
        elif isinstance(value, Mapping):
            click.echo(f"{key}:")
            for name, item in value.items():
                click.echo(f"  {name}: {item}")
        else:
            click.echo(f"{key}: {value}")
