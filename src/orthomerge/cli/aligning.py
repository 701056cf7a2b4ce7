"""What `align` does once its arguments are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import typer

from orthomerge.cli.commands import pairs, print_json
from orthomerge.recipe import parse_value

if TYPE_CHECKING:
    from orthomerge.data.task import Split

__all__ = ["align", "print_alignment"]


def align(
    path: str,
    *,
    data: list[str],
    experts: list[str],
    out: str,
    aligner: str,
    settings: list[str],
    base: str | None,
    split: str,
    limit: int | None,
    seed: int,
    device: str,
    batch: int,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    from orthomerge.aligning import align as run
    from orthomerge.cli.progress import shown

    options = {key: parse_value(value) for key, value in pairs(settings, "--set KEY=VALUE", "options").items()}
    sources, given = pairs(data, "--data TASK=PATH", "tasks"), pairs(experts, "--expert TASK=PATH", "experts")
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
