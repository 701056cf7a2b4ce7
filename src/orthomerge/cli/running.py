"""The command `run`: parse, call the library, say what came of it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orthomerge.cli.options import Json, Quiet

if TYPE_CHECKING:
    from orthomerge.runs.choosing import Best, Row
    from orthomerge.runs.run import Ran
    from orthomerge.runs.sweep import Swept

_SHOWN = 10  # reasons of failures that are printed


def run(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE.yaml", help="A recipe with a section `evaluate`.")],
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FOLDER", help="The run folder; runs/RECIPE if not given.")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            "--on", metavar="WHERE", help="process:N, ray, ray:N, or module:function that returns an Executor."
        ),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Print the cells of a sweep, and stop.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Do everything again, and replace an existing output of ours.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Carry out a whole recipe: merge, align, evaluate, diagnose, report, or a sweep; finished parts are kept."""
    from orthomerge.cli.printing import print_json
    from orthomerge.cli.progress import watched
    from orthomerge.runs.recipe import read_recipe
    from orthomerge.runs.run import run as carry_out
    from orthomerge.runs.variants import check_sweep

    if listed:
        cells = [(cell.title, cell.seed) for cell in check_sweep(read_recipe(Path(recipe)))[0]]
        if as_json:
            print_json([{"cell": title, "seed": seed} for title, seed in cells])
        else:
            typer.echo("\n".join((*(f"{title}, seed {seed}" for title, seed in cells), f"{len(cells)} cells")))
        return
    words = [recipe, *(["--out", out] if out is not None else []), *(["--on", on] if on is not None else [])]
    command = shlex.join(["orthomerge", "run", *words])
    try:
        with watched(quiet=quiet or as_json) as watch:
            ran = carry_out(recipe, out=out, on=on, force=force, watch=watch, command=command)
    except KeyboardInterrupt:
        sys.stderr.write("orthomerge: interrupted; what is done is kept: run the same command to go on\n")
        raise SystemExit(130) from None
    if as_json:
        print_json(_document(ran))
    else:
        _print(ran)
    if ran.swept is not None and ran.swept.failures:
        _print_failures(ran.folder, ran.swept)
        raise typer.Exit(1)


def _document(ran: Ran) -> dict[str, Any]:
    from orthomerge.models.manifest import read_manifest

    document: dict[str, Any] = {
        "run": str(ran.folder),
        "report": None if ran.page is None else str(ran.page),
        "stages": {
            name: {"state": state, "seconds": round(ran.seconds[name], 3)} for name, state in ran.stages.items()
        },
    }
    if ran.out is not None:
        document |= {"out": str(ran.out), "evaluation": read_manifest(ran.out).get("evaluation")}
    if ran.swept is not None:
        document |= {
            "cells": ran.swept.cells,
            "models": {"done": ran.swept.done, "found": ran.swept.found},
            "best": [_best(item) for item in ran.swept.best],
            "failed": [{"cell": failure.title, "message": failure.message} for failure in ran.swept.failures],
        }
    return document


def _best(item: Best) -> dict[str, Any]:
    def told(row: Row | None) -> dict[str, Any] | None:
        if row is None:
            return None
        val, test = (None if line is None else round(line.mean, 3) for line in (row.val, row.test))
        return {"merge": row.variant.name, "read": row.way.title, "access": row.way.access, "val": val, "test": test}

    return {"budget": item.budget, "chosen": told(item.chosen), "hindsight": told(item.hindsight)}


def _print(ran: Ran) -> None:
    """Tables and verdict where there are any, then where things are."""
    from orthomerge.analysis.diagnosis import FILE, read_diagnosis
    from orthomerge.cli.diagnosing import print_verdict
    from orthomerge.cli.printing import print_tables
    from orthomerge.evaluation.records import read_records
    from orthomerge.evaluation.tables import accuracy_tables

    if ran.swept is not None:
        text = (ran.folder / "sweep.md").read_text(encoding="utf-8")
        typer.echo(text.partition("\n### All cells")[0].strip())
        typer.echo(f"\n{ran.swept.cells} cells; {ran.swept.done} models scored, {ran.swept.found} found done")
        typer.echo(f"all cells: {ran.folder / 'sweep.csv'}")
    if "evaluate" in ran.stages:
        print_tables(accuracy_tables(read_records(ran.folder / "records.jsonl")))
        typer.echo("")
    if "diagnose" in ran.stages:
        print_verdict(read_diagnosis(ran.folder / FILE))
    done = [name for name, state in ran.stages.items() if state == "done"]
    found = [name for name, state in ran.stages.items() if state == "found"]
    if not done:
        typer.echo("nothing to do: everything is done, and its inputs have not changed (--force does all again)")
    elif ran.swept is None:
        seconds = sum(ran.seconds[name] for name in done)
        typer.echo(
            f"done in {seconds:.1f} s: {', '.join(done)}" + (f"; found done: {', '.join(found)}" if found else "")
        )
    if ran.out is not None:
        typer.echo(f"model: {ran.out}")
    if ran.page is not None:
        typer.echo(f"report: {ran.page}")


def _print_failures(folder: Path, swept: Swept) -> None:
    from orthomerge.runs.choosing import failure_lines

    reasons = failure_lines(swept.failures)
    lines = [f"  {reason}" for reason in reasons[:_SHOWN]]
    if len(reasons) > _SHOWN:
        lines.append(f"  and {len(reasons) - _SHOWN} other reasons: {folder / 'sweep.md'}")
    count = len({(failure.name, failure.way) for failure in swept.failures})
    sys.stderr.write("\n".join((f"orthomerge: {count} cells failed, the others are done:", *lines)) + "\n")
