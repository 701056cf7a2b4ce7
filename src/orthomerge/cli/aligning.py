"""The command `align`: parse, call the library, say what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from orthomerge.cli.options import Batch, Device, Force, Json, Quiet

if TYPE_CHECKING:
    from orthomerge.data.task import Split

__all__ = ["align", "print_alignment"]


def align(
    path: Annotated[str, typer.Argument(metavar="OUT", help="A folder that `orthomerge merge` wrote.")],
    data: Annotated[
        list[str],
        typer.Option("--data", metavar="TASK=PATH", help="A task's inputs; labels are not looked at. Repeat for each."),
    ],
    expert: Annotated[
        list[str], typer.Option("--expert", metavar="TASK=PATH", help="The expert of a task; repeat for each.")
    ],
    out: Annotated[str, typer.Option("--out", help="The folder to write.")],
    aligner: Annotated[str, typer.Option("--aligner", help="See `orthomerge aligners`.")] = "auto",
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the aligner; repeat for each."),
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", help="Needed for experts that are adapters, bare files or CLIP towers.")
    ] = None,
    split: Annotated[
        str, typer.Option("--split", help="train, val, or test: then what is measured there is transductive.")
    ] = "train",
    limit: Annotated[int | None, typer.Option("--limit", help="At most so many inputs a task.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="For --limit, and for aligners that draw at random.")] = 0,
    device: Device = "auto",
    batch: Batch = 64,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fit the heads of a merge to its encoder: unlabelled inputs, what the experts say of them, no new parameters."""
    from orthomerge.aligning import align as run
    from orthomerge.cli.commands import pairs, print_json
    from orthomerge.cli.progress import shown
    from orthomerge.recipe import parse_value

    options = {key: parse_value(value) for key, value in pairs(setting or [], "--set KEY=VALUE", "options").items()}
    sources, given = pairs(data, "--data TASK=PATH", "tasks"), pairs(expert, "--expert TASK=PATH", "experts")
    with shown(quiet=quiet or as_json) as progress:
        result = run(
            path,
            data=dict(sources),
            experts=dict(given),
            to=out,
            aligner=aligner,
            options=options,
            base=base,
            split=cast("Split", split),  # checked there
            limit=limit,
            seed=seed,
            device=device,
            batch=batch,
            force=force,
            progress=progress,
        )
    if as_json:
        print_json({"out": str(result.out), "manifest": result.manifest})
        return
    print_alignment(result.manifest)
    typer.echo(f"wrote {result.out}, verified")


def print_alignment(manifest: dict[str, Any]) -> None:
    """One line a task: on how many inputs, what the aligner found, and what it added."""
    about = manifest["alignment"]
    for task, found in about["tasks"].items():
        facts = ", ".join(f"{name} {_shown(value)}" for name, value in found["facts"].items()) or "no facts"
        added = found["extra"]["parameters"]
        grown = f"{added:,} parameters added" if added else "nothing added"
        typer.echo(f"{task}: {about['aligner']} on {found['inputs']} inputs of {about['split']}; {facts}; {grown}")
    for note in manifest["notes"]:
        typer.echo(f"note: {note}")


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
