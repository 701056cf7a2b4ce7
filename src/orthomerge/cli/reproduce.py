from typing import Annotated

import click

from orthomerge.cli.flags import Input, Output, Parts, command
from orthomerge.cli.options import Device
from orthomerge.core.progress import Progress
from orthomerge.core.table import Table


@command(
    "reproduce build digits --out digits",
    "reproduce build text8 --data tables --out text8",
    usage=("reproduce build SUITE --out FOLDER [OPTIONS]",),
)
def build(
    *,
    suite: Annotated[str, Input("Suite to build (`list suites`).", "SUITE", positional=True)],
    data: Annotated[str | None, Input("Folder with the suite's data.", "FOLDER", default="see `list suites`")] = None,
    base: Annotated[str | None, Input("Base to use instead.", "BASE", default="the suite's")] = None,
    device: Device = "auto",
    out: Annotated[str | None, Output("Folder of the suite.", "FOLDER", short="-o", default="a cache")] = None,
    progress: Progress,
) -> Parts:
    """Build a suite: fetch or train its base and experts.

    Parts that already exist are kept.
    """
    from orthomerge.suites.table import build_suite

    built = build_suite(suite, folder=out, data=data, base=base, device=device, say=progress.say)
    rows = {
        name: {
            "classes": len(task.labels),
            **{split: len(examples) for split, examples in task.splits.items()},
            "expert": str(built.paths.get(name, "")),
        }
        for name, task in built.tasks.items()
    }
    yield {"suite": built.name, "folder": str(built.folder), "tasks": rows}
    yield f"{built.name} in {built.folder}, base {built.base}"
    columns = ("classes", "train", "val", "test")
    counts = ((name, *(str(row.get(column, "")) for column in columns)) for name, row in rows.items())
    yield Table.of("", ("task", *columns), counts, left=5)


reproduce = click.Group("reproduce", commands=[build], help="Build named benchmarks.")
