"""The command `orthomerge`: parse, call the library, print. Nothing heavy is imported before a command runs.

Exit codes: 0 done; 1 other errors; 2 recipe or arguments; 3 a checkpoint is missing, broken or unsupported; 4 inputs
do not fit together; 5 the output cannot be written or does not verify; 6 NaN, infinity or overflow; 130 and 143
interrupted.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType
from typing import Annotated, NoReturn

import typer

from orthomerge.errors import OrthomergeError
from orthomerge.version import VERSION

__all__ = ["app", "main"]

app = typer.Typer(
    help="Merge fine-tuned classifiers into one model, heads included.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Exit codes: 0 done, 2 recipe or arguments, 3 checkpoint, 4 inputs do not fit together, 5 output, "
    "6 NaN or overflow, 130/143 interrupted.",
)

RecipePath = Annotated[str | None, typer.Argument(metavar="[RECIPE.yaml]", help="A recipe, ours or mergekit's.")]
Base = Annotated[
    str | None,
    typer.Option("--base", help="The model that the experts were fine-tuned from: folder, file or hub id."),
]
Experts = Annotated[list[str] | None, typer.Option("--expert", metavar="NAME=PATH", help="An expert; repeat for each.")]
Method = Annotated[str | None, typer.Option("--method", help="See `orthomerge methods`.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="An option of the method or of the recipe; repeat for each."),
]
Out = Annotated[str | None, typer.Option("--out", help="The folder to write.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output of ours.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="keep, float32, float16 or bfloat16.")]
ShardSize = Annotated[str | None, typer.Option("--max-shard-size", help="For example 5GB.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]


@app.command()
def merge(
    recipe: RecipePath = None,
    base: Base = None,
    expert: Experts = None,
    method: Method = None,
    setting: Settings = None,
    out: Out = None,
    dtype: Dtype = None,
    max_shard_size: ShardSize = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="TASK=PATH", help="A task's data, for --set scale=auto; repeat for each."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and stop.")] = False,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Merge experts into one encoder with all their heads."""
    from orthomerge.cli import commands

    given = commands.gather(
        recipe,
        base=base,
        experts=expert,
        method=method,
        settings=setting,
        out=out,
        dtype=dtype,
        max_shard_size=max_shard_size,
    )
    if dry_run:
        commands.plan(given, as_json=as_json)
    else:
        commands.merge(given, data=data or [], force=force, as_json=as_json, quiet=quiet)


@app.command()
def plan(
    recipe: RecipePath = None,
    base: Base = None,
    expert: Experts = None,
    method: Method = None,
    setting: Settings = None,
    out: Out = None,
    dtype: Dtype = None,
    max_shard_size: ShardSize = None,
    as_json: Json = False,
) -> None:
    """Check a merge from the headers alone: every problem in one table, each with its fix."""
    from orthomerge.cli import commands

    commands.plan(
        commands.gather(
            recipe,
            base=base,
            experts=expert,
            method=method,
            settings=setting,
            out=out,
            dtype=dtype,
            max_shard_size=max_shard_size,
        ),
        as_json=as_json,
    )


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="A folder, a file, an adapter or a hub id.")],
    as_json: Json = False,
    headers: Annotated[
        bool, typer.Option("--headers", help="Do not read the weights: no hashes, no NaN count.")
    ] = False,
) -> None:
    """Say what a checkpoint is: family, tensors, dtypes, head, hashes, NaN count."""
    from orthomerge.cli import commands

    commands.inspect(path, as_json=as_json, headers=headers)


@app.command()
def verify(
    path: Annotated[str, typer.Argument(help="A folder that `orthomerge merge` wrote.")],
    as_json: Json = False,
) -> None:
    """Re-derive every hash of an output."""
    from orthomerge.cli import commands

    commands.verify(path, as_json=as_json)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="One method, with its options.")] = None,
    as_json: Json = False,
) -> None:
    """List the merging methods, or the options of one."""
    from orthomerge.cli import commands

    commands.methods(name, as_json=as_json)


@app.command()
def export(
    path: Annotated[str, typer.Argument(help="A folder that `orthomerge merge` wrote.")],
    task: Annotated[str, typer.Option("--task", help="Whose head to put on the encoder.")],
    to: Annotated[str, typer.Option("--to", help="The folder to write.")],
    force: Force = False,
) -> None:
    """Write one task as an ordinary transformers classifier folder."""
    from orthomerge.merged import export as write

    write(path, task, to, force=force)
    typer.echo(f"wrote {to}: load it with transformers, or pipeline(..., model={to!r})")


suites = typer.Typer(help="Named benchmarks: base, experts and tasks.", no_args_is_help=True)
app.add_typer(suites, name="suite")

Folder = Annotated[str | None, typer.Option("--folder", help="Where the suite is kept; a cache folder if not given.")]
Data = Annotated[str | None, typer.Option("--data", help="The folder that holds the suite's data.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, ...")]


@suites.command("list")
def suite_list(as_json: Json = False) -> None:
    """List the suites."""
    from orthomerge.cli import measuring

    measuring.list_suites(as_json=as_json)


@suites.command("build")
def suite_build(
    name: Annotated[str, typer.Argument()],
    folder: Folder = None,
    data: Data = None,
    base: Base = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Make a suite: fetch or train its base and experts. What is there already is kept."""
    from orthomerge.cli import measuring

    suite = measuring.open_suite(name, folder=folder, data=data, base=base, device=device)
    measuring.show_suite(suite, as_json=as_json)


@suites.command("show")
def suite_show(name: Annotated[str, typer.Argument()], as_json: Json = False) -> None:
    """Say what a suite consists of, without building it."""
    from orthomerge.cli import measuring

    measuring.describe_suite(name, as_json=as_json)


@app.command()
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


@app.command()
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
    shots: Annotated[
        list[str] | None, typer.Option("--shots", help="Inputs a class, a share (0.1), or all; repeat.")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="Draws of few shots.")] = 5,
    access: Annotated[
        list[str] | None, typer.Option("--access", help="inductive, cross-fitted, transductive; repeat.")
    ] = None,
    out: Annotated[str, typer.Option("--out", help="The run folder.")] = "runs/evaluation",
    device: Device = "auto",
    batch: Annotated[int, typer.Option("--batch")] = 64,
    as_json: Json = False,
) -> None:
    """Score merged models under the papers' protocols, with what each number has seen."""
    from orthomerge.cli import measuring

    found = None
    if suite is not None:
        found = measuring.open_suite(suite, folder=folder, data=data[0] if data else None, base=None, device=device)
    measuring.evaluate(
        models=models or [],
        data=data or [],
        experts=expert or [],
        suite=found,
        methods=method or ["average", "task_arithmetic", "ties"],
        protocols=protocol or ["current", "knn", "aligned-c"],
        shots=shots or ["all"],
        seeds=seeds,
        access=access or ["inductive"],
        out=out,
        device=device,
        batch=batch,
        as_json=as_json,
    )


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"orthomerge {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def main() -> None:
    """Run a command: our errors become a message and an exit code, never a traceback."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app(standalone_mode=True)
    except OrthomergeError as error:
        sys.stderr.write(f"orthomerge: {error}\n")
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        sys.stderr.write("orthomerge: interrupted; nothing was left behind\n")
        raise SystemExit(130) from None
    except OSError as error:  # of standard output, say: every file of ours has its own message
        sys.stderr.write(f"orthomerge: {error.strerror or error}\n")
        raise SystemExit(1) from None


def run() -> NoReturn:
    """What the script `orthomerge` calls: a process of its own, which may end without tidying up.

    Taking torch down module by module costs as much CPU time as a small merge, and so does looking for garbage among
    the million objects that importing it makes, all of which stay.
    """
    gc.set_threshold(100_000, 50, 100)
    code = 0
    try:
        main()
    except SystemExit as done:
        if done.code not in (0, None):
            raise
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError as error:
        sys.stderr.write(f"orthomerge: cannot write to standard output: {error.strerror}\n")
        code = 1
    os._exit(code)


if __name__ == "__main__":
    run()
