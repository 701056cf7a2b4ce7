"""The command `reproduce build`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import click

from orthomerge.cli.flags import Flag, command
from orthomerge.cli.options import Device, Display
from orthomerge.cli.printing import print_json, print_progress, print_tables
from orthomerge.core.table import Table


@dataclass(frozen=True)
class Input:
    """Which suite, and of what."""

    suite: Annotated[str, Flag("See `list suites`.", "SUITE", positional=True)]
    data: Annotated[str | None, Flag("Folder with the suite's data.", "FOLDER", default="as `list suites` says")] = None
    base: Annotated[str | None, Flag("Another base.", "BASE", default="the suite's")] = None
    device: Device = "auto"


@dataclass(frozen=True)
class Output:
    """Where it is kept."""

    out: Annotated[str | None, Flag("Folder of the suite.", "FOLDER", short="-o", default="a cache")] = None


@command(
    usage=("reproduce build SUITE --out FOLDER [OPTIONS]",),
    examples=("reproduce build digits --out digits", "reproduce build text8 --data tables --out text8"),
)
def build(given: Input, output: Output, display: Display) -> None:
    """Build a suite: fetch or train its base and experts.

    What is there already is kept.
    """
    from orthomerge.api.suite import open_suite

    suite = open_suite(
        given.suite,
        folder=output.out,
        data=given.data,
        base=given.base,
        device=given.device,
        say=(lambda text: None) if display.quiet else print_progress,
    )
    rows = {
        name: {
            "classes": len(task.labels),
            **{split: len(examples) for split, examples in task.splits.items()},
            "expert": str(suite.paths.get(name, "")),
        }
        for name, task in suite.tasks.items()
    }
    if display.json:
        print_json({"suite": suite.name, "folder": str(suite.folder), "tasks": rows})
        return
    click.echo(f"{suite.name} in {suite.folder}, base {suite.base}")
    columns = ("classes", "train", "val", "test")
    counts = ((name, *(str(row.get(column, "")) for column in columns)) for name, row in rows.items())
    print_tables([Table.of("", ("task", *columns), counts, left=5)])


reproduce = click.Group("reproduce", commands=[build], help="Build named benchmarks.")
