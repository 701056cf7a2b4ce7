"""The commands that make experts, measure models and edit them: parse, call the library."""

from pathlib import Path
from typing import Annotated

import typer

from orthomerge.cli.diagnosing import diagnose
from orthomerge.cli.options import (
    Base,
    Batch,
    Device,
    Dtype,
    Experts,
    Folder,
    Force,
    Grid,
    Json,
    Out,
    Quiet,
    RecipePath,
    Settings,
)
from orthomerge.cli.pushing import push
from orthomerge.cli.running import run

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

    scoring.evaluate(
        models=models or [],
        data=data or [],
        experts=expert or [],
        suite=suite,
        folder=folder,
        methods=method or ["average", "task_arithmetic", "ties"],
        protocols=protocol or ["current", "knn", "aligned-c"],
        aligners=aligner or [],
        shots=shots or ["all"],
        seeds=seeds,
        access=access or ["inductive"],
        against=against,
        margin=margin,
        out=out,
        device=device,
        batch=batch,
        as_json=as_json,
    )


def negate(
    target: Annotated[str, typer.Option("--target", metavar="TASK", help="Which expert's task to forget.")],
    data: Annotated[
        list[str], typer.Option("--data", metavar="TASK=PATH", help="Labelled data of target and controls; repeat.")
    ],
    recipe: RecipePath = None,
    base: Base = None,
    expert: Experts = None,
    control: Annotated[
        list[str] | None,
        typer.Option("--control", metavar="TASK", help="What to keep; all other tasks with data if not given."),
    ] = None,
    heads: Annotated[
        str, typer.Option("--heads", help="probe (fitted on the base's features) or expert: who reads the tasks.")
    ] = "probe",
    keep: Annotated[float, typer.Option("--keep", help="The share of the base's control accuracy to keep.")] = 0.95,
    grid: Grid = None,
    out: Out = None,
    dtype: Dtype = None,
    device: Device = "auto",
    batch: Batch = 64,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Forget a task: the base minus its task vector, as far as a control allows, beside a random vector."""
    from orthomerge.cli import commands, editing

    editing.negate(
        commands.gather(
            recipe,
            base=base,
            experts=expert,
            method=None,
            settings=None,
            out=out,
            dtype=dtype,
            max_shard_size=None,
            aligning=False,
        ),
        target=target,
        controls=control or [],
        data=data,
        heads=heads,
        keep=keep,
        grid=grid,
        device=device,
        batch=batch,
        force=force,
        as_json=as_json,
        quiet=quiet,
    )


def analogy(
    of: Annotated[str, typer.Option("--of", metavar="A:B::C", help="A is to B as C is to the task of --data.")],
    data: Annotated[str, typer.Option("--data", metavar="TASK=PATH", help="Labelled validation and test data.")],
    recipe: RecipePath = None,
    base: Base = None,
    expert: Experts = None,
    independent: Annotated[
        bool, typer.Option("--independent", help="A coefficient for C and one for B - A: all pairs of the grid.")
    ] = False,
    grid: Grid = None,
    out: Out = None,
    dtype: Dtype = None,
    device: Device = "auto",
    batch: Batch = 64,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make a model for a task without training data: C + (B - A). An expert of the task itself is the ceiling."""
    from orthomerge.cli import commands, editing

    editing.analogy(
        commands.gather(
            recipe,
            base=base,
            experts=expert,
            method=None,
            settings=None,
            out=out,
            dtype=dtype,
            max_shard_size=None,
            aligning=False,
        ),
        of=of,
        data=data,
        independent=independent,
        grid=grid,
        device=device,
        batch=batch,
        force=force,
        as_json=as_json,
        quiet=quiet,
    )


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder: what `evaluate` and `diagnose` wrote.")],
    out: Annotated[str, typer.Option("--out", help="The page; its figures and tables go into a folder beside it.")],
    title: Annotated[str | None, typer.Option("--title", help="The heading, instead of the suite's name.")] = None,
    as_json: Json = False,
) -> None:
    """Make one page of a run that opens anywhere, and its figures and tables as files. No model is needed."""
    from orthomerge.cli import reporting

    reporting.report(run, out=out, title=title, as_json=as_json)


COMMANDS = (run, finetune, evaluate, negate, analogy, diagnose, report, push)
