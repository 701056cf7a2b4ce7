"""The commands `run` and `work`: parse, call the library, say what came of it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orthomerge.cli.options import Json, Quiet

if TYPE_CHECKING:
    from orthomerge.running.line import Ran

__all__ = ["run", "work"]


def run(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE.yaml", help="A recipe with a block `evaluate`.")],
    folder: Annotated[
        str | None, typer.Option("--run", metavar="FOLDER", help="The run folder; runs/RECIPE if not given.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Do everything again, and replace an existing output of ours.")
    ] = False,
    on: Annotated[
        str | None,
        typer.Option(
            "--on", metavar="WHERE", help="In jobs: serial, process[:N], ray[:N] or ray://host:port (docs/scaling.md)."
        ),
    ] = None,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Only write the jobs to RUN/plan.json, for `orthomerge work`.")
    ] = False,
    part: Annotated[
        int, typer.Option("--part", metavar="N", help="Inputs in one job of statistics, where `align` streams.")
    ] = 4096,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Do the whole line of a recipe: merge, align, evaluate, diagnose, report. What is done is not done again."""
    from orthomerge.cli.commands import print_json
    from orthomerge.cli.progress import watched
    from orthomerge.running.line import run as carry_out

    given = [recipe, *(["--run", folder] if folder is not None else [])]
    command = shlex.join(["orthomerge", "run", *given])
    if plan_only:
        _plan(recipe, folder, force=force, part=part, command=command, as_json=as_json)
        return
    try:
        with watched(quiet=quiet or as_json) as watch:
            ran = carry_out(recipe, run=folder, force=force, watch=watch, command=command, on=on, part=part)
    except KeyboardInterrupt:
        sys.stderr.write("orthomerge: interrupted; stages that are done are kept: run the same command to go on\n")
        raise SystemExit(130) from None
    if as_json:
        print_json(_document(ran))
    else:
        _print(ran)


def work(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A folder that `orthomerge run --plan-only` made.")],
    shard: Annotated[
        str | None, typer.Option("--shard", metavar="i/N", help="Do every N-th job, from the i-th on; else any.")
    ] = None,
    steal: Annotated[
        bool, typer.Option("--steal", help="While waiting, do jobs of other shards that nobody is at.")
    ] = False,
    patience: Annotated[
        float, typer.Option("--patience", metavar="SECONDS", help="How long to wait for others without any news.")
    ] = 3600.0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Do jobs of a planned run, beside other workers that see the same folder: Slurm arrays, ssh, several shells."""
    from orthomerge.cli.commands import print_json
    from orthomerge.cli.progress import watched
    from orthomerge.running.jobs.working import parse_shard
    from orthomerge.running.jobs.working import work as carry_out

    def say(text: str) -> None:
        if not quiet:
            sys.stderr.write(f"{text}\n")

    given = None if shard is None else parse_shard(shard)
    with watched(quiet=quiet or as_json) as watch:
        worked = carry_out(run, shard=given, steal=steal, patience=patience, watch=watch, say=say)
    if as_json:
        told = {"run": str(worked.run), "done": worked.done, "found": worked.found, "complete": worked.complete}
        print_json(told)
        return
    typer.echo(f"{len(worked.done)} jobs done, {worked.found} found done")
    typer.echo(f"the run is {'complete' if worked.complete else 'not complete: others are at work'}: {worked.run}")


def _plan(recipe: str, folder: str | None, *, force: bool, part: int, command: str, as_json: bool) -> None:
    from collections import Counter

    from orthomerge.cli.commands import print_json
    from orthomerge.running.jobs.driving import plan_run
    from orthomerge.running.line import check_recipe, read_run_recipe

    given, text, run = read_run_recipe(recipe, folder)
    check_recipe(given)
    plan = plan_run(given, text, run, force=force, command=command, part=part)
    counts = Counter(job.kind for job in plan.jobs)
    if as_json:
        print_json({"run": str(run), "jobs": dict(counts)})
        return
    typer.echo(f"{len(plan.jobs)} jobs: {', '.join(f'{count} {kind}' for kind, count in counts.items())}")
    typer.echo(f"plan: {run / 'plan.json'}; now `orthomerge work {shlex.quote(str(run))}`, as often as you like")


def _document(ran: Ran) -> dict[str, object]:
    from orthomerge.manifest import read_manifest

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
    from orthomerge.cli.commands import print_tables
    from orthomerge.cli.diagnosing import print_verdict
    from orthomerge.evaluation.tables import accuracy_tables
    from orthomerge.records import read_records

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
