"""The command `orthomerge`: parse, call the library, print. Nothing heavy is imported before a command runs.

Exit codes: 0 done; 1 other errors; 2 recipe or arguments; 3 a checkpoint is missing, broken or unsupported; 4 inputs
do not fit together; 5 the output cannot be written or does not verify; 6 NaN, infinity or overflow; 130 and 143
interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Annotated, NoReturn, Optional

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

# Typer reads these at run time, where `X | None` inside Annotated is not understood by its oldest supported release.
RecipePath = Annotated[Optional[str], typer.Argument(metavar="[RECIPE.yaml]", help="A recipe, ours or mergekit's.")]  # noqa: UP045
Base = Annotated[
    str | None,
    typer.Option("--base", help="The model that the experts were fine-tuned from: folder, file or hub id."),
]
Experts = Annotated[list[str] | None, typer.Option("--expert", metavar="NAME=PATH", help="An expert; repeat for each.")]
Method = Annotated[Optional[str], typer.Option("--method", help="See `orthomerge methods`.")]  # noqa: UP045
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="An option of the method or of the recipe; repeat for each."),
]
Out = Annotated[Optional[str], typer.Option("--out", help="The folder to write.")]  # noqa: UP045
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output of ours.")]
Dtype = Annotated[Optional[str], typer.Option("--dtype", help="keep, float32, float16 or bfloat16.")]  # noqa: UP045
ShardSize = Annotated[Optional[str], typer.Option("--max-shard-size", help="For example 5GB.")]  # noqa: UP045
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
        commands.merge(given, force=force, as_json=as_json, quiet=quiet)


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
    name: Annotated[Optional[str], typer.Argument(help="One method, with its options.")] = None,  # noqa: UP045
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
    """Entry point: our errors become a message and an exit code, never a traceback."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app(standalone_mode=True)
    except OrthomergeError as error:
        sys.stderr.write(f"orthomerge: {error}\n")
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        sys.stderr.write("orthomerge: interrupted; nothing was left behind\n")
        raise SystemExit(130) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None


if __name__ == "__main__":
    main()
