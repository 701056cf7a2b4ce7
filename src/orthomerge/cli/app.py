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
import threading
import time
from types import FrameType
from typing import Annotated, NoReturn

import typer

from orthomerge.cli.aligning import align
from orthomerge.cli.exporting import export
from orthomerge.cli.options import (
    Base,
    Dtype,
    Experts,
    Force,
    Json,
    Method,
    Out,
    Quiet,
    RecipePath,
    Settings,
    ShardSize,
)
from orthomerge.cli.study import COMMANDS, suites
from orthomerge.core.errors import OrthomergeError, RecipeError
from orthomerge.core.version import VERSION

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE = 3.0  # seconds after a signal in which no other one counts

app = typer.Typer(
    help="Merge fine-tuned classifiers into one model, heads included.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Exit codes: 0 done, 2 recipe or arguments, 3 checkpoint, 4 inputs do not fit together, 5 output, "
    "6 NaN or overflow, 130/143 interrupted.",
)


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
        typer.Option(
            "--data",
            metavar="TASK=PATH",
            help="A task's inputs, for a fitted method (realign if none is named) or --set scale=auto; repeat.",
        ),
    ] = None,
    split: Annotated[
        str | None, typer.Option("--split", help="Which split of --data a fitted method sees: train, val or test.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="At most so many inputs a task for the fit.")] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Of a fit, or of a method that decomposes matrices: auto, cpu, cuda.")
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
        fit=commands.fit_block(data, split=split, limit=limit, device=device),
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
    verify: Annotated[
        bool, typer.Option("--verify", help="Of a merged model: compare every file with its recorded hash.")
    ] = False,
) -> None:
    """Say what a checkpoint is: family, tensors, dtypes, head, hashes, NaN count."""
    from orthomerge.cli import commands

    if verify and headers:
        raise RecipeError("--verify reads every file: leave --headers out")
    if verify:
        commands.verify(path, as_json=as_json)
    else:
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
    from orthomerge.cli import catalogue

    catalogue.methods(name, as_json=as_json)


@app.command()
def aligners(
    name: Annotated[str | None, typer.Argument(help="One aligner, with its options.")] = None,
    as_json: Json = False,
) -> None:
    """List the aligners, or the options of one."""
    from orthomerge.cli import catalogue

    catalogue.aligners(name, as_json=as_json)


app.add_typer(suites, name="suite")
for _command in (align, export, *COMMANDS):
    app.command()(_command)


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


def _heed_signals() -> list[int]:
    """SIGINT and SIGTERM end the run in order; another one at once does not disturb it while it clears up.

    Gives a list that those which ended it are added to.
    """
    last, heard = -_PATIENCE, list[int]()

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal last
        if time.monotonic() - last >= _PATIENCE:
            last = time.monotonic()
            heard.append(number)
            raise SystemExit(128 + number)

    def raise_again(ignored: sys.UnraisableHookArgs) -> None:
        """Python drops what is raised inside a `__del__`: send the signal again, a moment later."""
        nonlocal last
        if not (heard and isinstance(ignored.exc_value, SystemExit)):
            sys.__unraisablehook__(ignored)
            return
        last = -_PATIENCE
        threading.Timer(0.01, os.kill, (os.getpid(), heard[0])).start()

    for number in _SIGNALS:
        signal.signal(number, stop)
    sys.unraisablehook = raise_again
    return heard


def main() -> None:
    """Run a command: our errors become a message and an exit code, never a traceback."""
    heard = _heed_signals()
    try:
        app(standalone_mode=True)
    except (SystemExit, Exception) as error:
        # Libraries that are interrupted while they are imported may make another error of it.
        if heard:
            sys.stderr.write("orthomerge: interrupted; nothing half-written was left behind: run it again to go on\n")
            raise SystemExit(128 + heard[0]) from None
        if isinstance(error, OrthomergeError):
            sys.stderr.write(f"orthomerge: {error}\n")
            raise SystemExit(error.exit_code) from None
        if isinstance(error, OSError):  # of standard output, say: every file of ours has its own message
            sys.stderr.write(f"orthomerge: {error.strerror or error}\n")
            raise SystemExit(1) from None
        raise


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
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # all is done
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError as error:
        sys.stderr.write(f"orthomerge: cannot write to standard output: {error.strerror}\n")
        code = 1
    os._exit(code)


if __name__ == "__main__":
    run()
