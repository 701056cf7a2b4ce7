"""The commands that make experts and measure models: parse, call the library."""

from pathlib import Path
from typing import Annotated

import typer

from orthomerge.cli.diagnosing import diagnose
from orthomerge.cli.editing import analogy, negate
from orthomerge.cli.evaluate import evaluate
from orthomerge.cli.options import Base, Device, Folder, Force, Json, Quiet, Settings
from orthomerge.cli.pushing import push
from orthomerge.cli.reporting import report
from orthomerge.cli.running import run

suites = typer.Typer(help="Named benchmarks: base, experts and tasks.", no_args_is_help=True)


@suites.command("list")
def suite_list(as_json: Json = False) -> None:
    """List the suites."""
    from orthomerge.cli import measuring

    measuring.list_suites(as_json=as_json)


@suites.command("build")
def suite_build(
    name: Annotated[str, typer.Argument()],
    folder: Folder = None,
    data: Annotated[str | None, typer.Option("--data", help="The folder that holds the suite's data.")] = None,
    base: Base = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Make a suite: fetch or train its base and experts. What is there already is kept."""
    from orthomerge.cli import measuring
    from orthomerge.suites.suite import suite_root
    from orthomerge.suites.table import build_suite

    suite = build_suite(
        name,
        folder=Path(folder) if folder else suite_root() / name,
        data=Path(data) if data else None,
        base=base,
        device=device,
        say=measuring.say,
    )
    measuring.show_suite(suite, as_json=as_json)


@suites.command("show")
def suite_show(name: Annotated[str, typer.Argument()], as_json: Json = False) -> None:
    """Say what a suite consists of, without building it."""
    from orthomerge.cli import measuring

    measuring.describe_suite(name, as_json=as_json)


def finetune(
    base: Annotated[str, typer.Option("--base", help="The encoder to start from: folder or hub id.")],
    data: Annotated[str, typer.Option("--data", help="A labelled task: table, .npz, image folder or dataset.")],
    out: Annotated[str, typer.Option("--out", help="The folder to write.")],
    setting: Settings = None,
    other: Annotated[list[str] | None, typer.Option("--other", help="Another task's data, for mode=tau_jp.")] = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make an expert: --set mode=full, head_first, frozen_head, lora, linearised or tau_jp."""
    from orthomerge.cli import measuring

    measuring.finetune(
        base=base,
        data=data,
        out=out,
        settings=setting or [],
        others=other or [],
        force=force,
        as_json=as_json,
        quiet=quiet,
    )


COMMANDS = (run, finetune, evaluate, negate, analogy, diagnose, report, push)
