"""The command `finetune`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import click

from orthomerge.cli.flags import Flag, command
from orthomerge.cli.options import Columns, Display, Force
from orthomerge.cli.printing import print_json, print_progress


@dataclass(frozen=True)
class Input:
    """What is trained, and on what."""

    base: Annotated[str, Flag("The encoder to start from: folder or hub id.", "BASE")]
    data: Annotated[str, Flag("A labelled task: table, .npz, image folder or dataset.", "PATH")]
    other: Annotated[
        tuple[str, ...], Flag("Data of another task, for mode=tau_jp; repeated.", "PATH", default="none")
    ] = ()


@dataclass(frozen=True)
class How:
    """How it is trained."""

    settings: Annotated[
        dict[str, str],
        Flag(
            "mode=full, head_first, frozen_head, lora, linearised or tau_jp; epochs, lr, batch, "
            "max_length, device ...; repeated.",
            "KEY=VALUE",
            name="--set",
            default="mode=full",
        ),
    ] = field(default_factory=dict)


@dataclass(frozen=True)
class Output:
    """What is written."""

    out: Annotated[str, Flag("Folder to write.", "FOLDER", short="-o")]
    force: Force = False


@command(
    usage=("finetune --base BASE --data PATH --out FOLDER [OPTIONS]",),
    examples=("finetune --base base --data topic.csv --out topic --set lr=5e-5",),
)
def finetune(given: Input, columns: Columns, how: How, output: Output, display: Display) -> None:
    """Make an expert: fine-tune a base on one task."""
    from orthomerge.api.finetune import write_expert
    from orthomerge.api.request import read_options

    metrics = write_expert(
        given.base,
        columns.of(given.data),
        output.out,
        others=[columns.of(other) for other in given.other],
        force=output.force,
        progress=None if display.quiet else lambda report: print_progress(str(report)),
        **read_options(how.settings),
    )
    if display.json:
        print_json({"out": output.out, "metrics": metrics})
    else:
        click.echo(f"wrote {output.out}: " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
