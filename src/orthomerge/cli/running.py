"""The command `run`: parse, call the library, say what came of it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orthomerge.cli.options import Json, Quiet

if TYPE_CHECKING:
    from orthomerge.runs.line import Ran


def run(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE.yaml", help="A recipe with a block `evaluate`.")],
    folder: Annotated[
        str | None, typer.Option("--run", metavar="FOLDER", help="The run folder; runs/RECIPE if not given.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Do everything again, and replace an existing output of ours.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Do the whole line of a recipe: merge, align, evaluate, diagnose, report. What is done is not done again."""
    from orthomerge.cli.printing import print_json
    from orthomerge.cli.progress import watched
    from orthomerge.runs.line import run as carry_out

    given = [recipe, *(["--run", folder] if folder is not None else [])]
    command = shlex.join(["orthomerge", "run", *given])
    try:
        with watched(quiet=quiet or as_json) as watch:
            ran = carry_out(recipe, run=folder, force=force, watch=watch, command=command)
    except KeyboardInterrupt:
        sys.stderr.write("orthomerge: interrupted; stages that are done are kept: run the same command to go on\n")
        raise SystemExit(130) from None
    if as_json:
        print_json(_document(ran))
    else:
        _print(ran)


def _document(ran: Ran) -> dict[str, object]:
    from orthomerge.models.manifest import read_manifest

    return {
        "run": str(ran.folder),
        "out": str(ran.out),
        "report": None if ran.page is None else str(ran.page),
        "stages": {
            name: {"state": state, "seconds": round(ran.seconds[name], 3)} for name, state in ran.stages.items()
        },
        "evaluation": read_manifest(ran.out).get("evaluation"),
    }


def _print(ran: Ran) -> None:
    """Tables and verdict where there are any, then where things are."""
    from orthomerge.analysis.diagnosis import FILE, read_diagnosis
    from orthomerge.cli.diagnosing import print_verdict
    from orthomerge.cli.printing import print_tables
    from orthomerge.evaluation.records import read_records
    from orthomerge.evaluation.tables import accuracy_tables

    if "evaluate" in ran.stages:
        print_tables(accuracy_tables(read_records(ran.folder / "records.jsonl")))
        typer.echo("")
    if "diagnose" in ran.stages:
        print_verdict(read_diagnosis(ran.folder / FILE))
    done = [name for name, state in ran.stages.items() if state == "done"]
    found = [name for name, state in ran.stages.items() if state == "found"]
    if done:
        told = f"done in {sum(ran.seconds[name] for name in done):.1f} s: {', '.join(done)}"
        typer.echo(told + (f"; found done: {', '.join(found)}" if found else ""))
    else:
        typer.echo("nothing to do: every stage is done, and its inputs have not changed (--force does all again)")
    typer.echo(f"model: {ran.out}")
    if ran.page is not None:
        typer.echo(f"report: {Path(ran.page)}")
