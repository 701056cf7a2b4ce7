"""The command `align`: parse, call the library, say what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from orthomerge.cli.options import Batch, Device, Force, Json, Quiet

if TYPE_CHECKING:
    from orthomerge.data.task import Split


def align(
    path: Annotated[str, typer.Argument(metavar="OUT", help="A folder that `orthomerge merge` wrote.")],
    data: Annotated[
        list[str],
        typer.Option("--data", metavar="TASK=PATH", help="A task's inputs; labels are not looked at. Repeat for each."),
    ],
    out: Annotated[str, typer.Option("--out", help="The folder to write.")],
    aligner: Annotated[str, typer.Option("--aligner", help="See `orthomerge aligners`.")] = "auto",
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the aligner; repeat for each."),
    ] = None,
    expert: Annotated[
        list[str] | None,
        typer.Option("--expert", metavar="TASK=PATH", help="Where an expert is now, if it was moved; repeat for each."),
    ] = None,
    base: Annotated[str | None, typer.Option("--base", help="Where the base is now, if it was moved.")] = None,
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
    from orthomerge.api.align import align as fit_heads
    from orthomerge.api.load import resolve
    from orthomerge.cli.printing import pairs, print_json
    from orthomerge.cli.progress import shown
    from orthomerge.files.publish import check_target
    from orthomerge.models.encoding import Encoding
    from orthomerge.models.experts import reopen_experts
    from orthomerge.models.writing import write_model
    from orthomerge.runs.recipe import parse_value

    options = {key: parse_value(value) for key, value in pairs(setting or [], "--set KEY=VALUE", "options").items()}
    sources, moved = pairs(data, "--data TASK=PATH", "tasks"), pairs(expert or [], "--expert TASK=PATH", "experts")
    target = Path(out)
    inputs = [Path(each) for each in (path, *sources.values(), *moved.values(), *([base] if base else []))]
    check_target(target, force=force, inputs=inputs)  # before any work
    model, folder = resolve(path)
    for task in (*sources, *moved):
        model.head(task)
    with shown(quiet=quiet or as_json) as progress:
        aligned = fit_heads(
            model,
            sources,
            aligner=aligner,
            options=options,
            experts=reopen_experts(model, folder=folder, base=base, experts=moved, tasks=tuple(sources)),
            split=cast("Split", split),  # checked there
            limit=limit,
            seed=seed,
            encoding=Encoding(device=device, batch=batch),
            progress=progress,
        )
        manifest = write_model(aligned, target, force=force, inputs=inputs)
    if as_json:
        print_json({"out": out, "manifest": manifest})
        return
    print_alignment(manifest)
    typer.echo(f"wrote {out}, verified")


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
