"""The command `sweep`: parse, call the library, say what came of it."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orthomerge.cli.options import Json, Quiet

if TYPE_CHECKING:
    from orthomerge.runs.sweeping.choosing import Best, Row
    from orthomerge.runs.sweeping.sweep import Swept


_SHOWN = 10  # reasons of failures that are told


def sweep(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE.yaml", help="A recipe with blocks `evaluate` and `sweep`.")],
    folder: Annotated[
        str | None, typer.Option("--run", metavar="FOLDER", help="The run folder; runs/RECIPE-sweep if not given.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Print the cells, and stop.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Do everything again.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Merge and score methods x scales x seeds x aligners x shots from one recipe. What is done is not done again."""
    from orthomerge.cli.printing import print_json
    from orthomerge.cli.progress import watched
    from orthomerge.runs.sweeping.sweep import list_cells
    from orthomerge.runs.sweeping.sweep import sweep as carry_out

    if listed:
        cells = [(cell.title, cell.seed) for cell in list_cells(recipe)]
        if as_json:
            print_json([{"cell": title, "seed": seed} for title, seed in cells])
        else:
            typer.echo("\n".join((*(f"{title}, seed {seed}" for title, seed in cells), f"{len(cells)} cells")))
        return

    def say(text: str) -> None:
        if not quiet and not as_json:
            sys.stderr.write(f"{text}\n")

    command = shlex.join(["orthomerge", "sweep", recipe, *(["--run", folder] if folder is not None else [])])
    try:
        with watched(quiet=quiet or as_json) as watch:
            swept = carry_out(recipe, run=folder, force=force, watch=watch, command=command, say=say)
    except KeyboardInterrupt:
        sys.stderr.write("orthomerge: interrupted; what is done is kept: run the same command to go on\n")
        raise SystemExit(130) from None
    if as_json:
        print_json(_document(swept))
    else:
        _print(swept)
    if swept.failures:
        _print_failures(swept)
        raise typer.Exit(1)


def _document(swept: Swept) -> dict[str, Any]:
    return {
        "run": str(swept.folder),
        "report": None if swept.page is None else str(swept.page),
        "cells": swept.cells,
        "models": {"done": swept.done, "found": swept.found},
        "best": [_best(item) for item in swept.best],
        "failed": [{"cell": failure.title, "message": failure.message} for failure in swept.failures],
    }


def _best(item: Best) -> dict[str, Any]:
    def told(row: Row | None) -> dict[str, Any] | None:
        if row is None:
            return None
        val, test = (None if line is None else round(line.mean, 3) for line in (row.val, row.test))
        return {"merge": row.variant.name, "read": row.way.title, "access": row.way.access, "val": val, "test": test}

    return {"budget": item.budget, "chosen": told(item.chosen), "hindsight": told(item.hindsight)}


def _print(swept: Swept) -> None:
    """The best for each budget, then where everything is."""
    text = (swept.folder / "sweep.md").read_text(encoding="utf-8")
    typer.echo(text.partition("\n### All cells")[0].strip())
    typer.echo("")
    typer.echo(f"{swept.cells} cells; {swept.done} models scored, {swept.found} found done")
    typer.echo(f"all cells: {swept.folder / 'sweep.csv'}")
    if swept.page is not None:
        typer.echo(f"report: {swept.page}")


def _print_failures(swept: Swept) -> None:
    from orthomerge.runs.sweeping.choosing import told_failures

    reasons = told_failures(swept.failures)
    lines = [f"  {reason}" for reason in reasons[:_SHOWN]]
    if len(reasons) > _SHOWN:
        lines.append(f"  and {len(reasons) - _SHOWN} other reasons: {swept.folder / 'sweep.md'}")
    count = len({(failure.name, failure.way) for failure in swept.failures})
    sys.stderr.write("\n".join((f"orthomerge: {count} cells failed, the others are done:", *lines)) + "\n")
