"""The commands that make experts and measure models: parse, call the library."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from orthomerge.cli.diagnosing import diagnose
from orthomerge.cli.editing import analogy, negate
from orthomerge.cli.options import Base, Device, Folder, Force, Json, Quiet, Settings
from orthomerge.cli.pushing import push
from orthomerge.cli.reporting import report
from orthomerge.cli.running import run
from orthomerge.core.table import plain
from orthomerge.errors import RecipeError

__all__ = ["COMMANDS", "suites"]

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


def evaluate(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[OUT]...", help="Outputs of `orthomerge merge`.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="TASK=PATH", help="A task's data; repeat. For a suite: its folder."),
    ] = None,
    expert: Annotated[
        list[str] | None,
        typer.Option("--expert", metavar="TASK=PATH", help="The expert, as reference and teacher; repeat."),
    ] = None,
    suite: Annotated[str | None, typer.Option("--suite", help="Evaluate merges of a suite's experts instead.")] = None,
    folder: Folder = None,
    method: Annotated[
        list[str] | None, typer.Option("--method", help="For a suite, e.g. ties or 'ties:density: 0.3'; repeat.")
    ] = None,
    protocol: Annotated[
        list[str] | None, typer.Option("--protocol", help="current, knn, aligned-c, probe; repeat.")
    ] = None,
    aligner: Annotated[
        list[str] | None, typer.Option("--aligner", help="Read through an aligner too (see `aligners`); repeat.")
    ] = None,
    shots: Annotated[
        list[str] | None, typer.Option("--shots", help="Inputs a class, a share (0.1), or all; repeat.")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="Draws of few shots.")] = 5,
    access: Annotated[list[str] | None, typer.Option("--access", help="inductive, transductive; repeat.")] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="NAME", help="Compare every method with this one; else with the best."),
    ] = None,
    margin: Annotated[
        float, typer.Option("--margin", help="Points below which two methods may be called comparable.")
    ] = 1.0,
    out: Annotated[str, typer.Option("--out", help="The run folder.")] = "runs/evaluation",
    device: Device = "auto",
    batch: Annotated[int, typer.Option("--batch")] = 64,
    as_json: Json = False,
) -> None:
    """Score merged models under the papers' protocols, with what each number has seen, and compare them."""
    from orthomerge.cli import scoring
    from orthomerge.cli.commands import print_json, print_tables
    from orthomerge.cli.measuring import open_suite, say
    from orthomerge.evaluation.running import read_run, run_evaluation

    questions = scoring.questions_of(
        protocol or ["current", "knn", "aligned-c"], aligner or [], shots or ["all"], seeds, access or ["inductive"]
    )
    if not margin > 0:
        raise RecipeError(f"--margin must be a positive number of points, got {margin:g}")
    if suite is not None:
        merges = scoring.merges_of(suite, method or ["average", "task_arithmetic", "ties"])
        scoring.check_against(against, merges)
        built = open_suite(suite, folder=folder, data=data[0] if data else None, base=None, device=device)
        bench, subjects = scoring.suite_subjects(built, merges, device, batch)
    with scoring.experts_or_nothing(Path(out)):
        if suite is None:
            bench, subjects = scoring.own_subjects(models or [], data or [], expert or [], device, batch, Path(out))
        run_evaluation(
            bench,
            subjects,
            questions,
            out=Path(out),
            suite=suite,
            against=against,
            margin=margin / 100,
            say=say,
        )
    run = read_run(Path(out))
    if as_json:
        print_json(asdict(run))
        return
    print_tables(run.tables())
    for note in run.notes:
        typer.echo(f"\nwarning: {plain(note)}")
    typer.echo(f"\nrecords, predictions, comparisons and the tables are in {out}")


COMMANDS = (run, finetune, evaluate, negate, analogy, diagnose, report, push)
