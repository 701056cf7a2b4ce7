"""The command `align`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import click

from orthomerge.cli.flags import Flag, command
from orthomerge.cli.options import Columns, Compute, Display, Force, Limit, Moved, Split, Unlabelled
from orthomerge.cli.printing import print_json


@dataclass(frozen=True)
class Input:
    """A merged model, and the inputs that its heads are aligned on."""

    model: Annotated[str, Flag("Folder of a merged model.", "MODEL", positional=True)]
    data: Unlabelled = field(default_factory=dict)
    split: Annotated[Split, Flag("Split of the data; with `test`, what is measured there is transductive.")] = "train"
    limit: Limit = None


@dataclass(frozen=True)
class How:
    """The aligner and where it is computed."""

    aligner: Annotated[str, Flag("See `list aligners`.", "NAME")] = "auto"
    settings: Annotated[
        dict[str, str], Flag("Option of the aligner (`list aligners NAME`), repeated.", "KEY=VALUE", name="--set")
    ] = field(default_factory=dict)
    seed: Annotated[int, Flag("Of --limit, and of aligners that draw at random.", "N")] = 0


@dataclass(frozen=True)
class Output:
    """What is written."""

    out: Annotated[str, Flag("Folder to write.", "FOLDER", short="-o")]
    force: Force = False


@command(
    usage=("align MODEL --data FOLDER --out FOLDER [OPTIONS]",),
    examples=(
        "align merged --data texts --out aligned",
        "align merged --data topic=topic.csv --aligner ridge -o aligned",
    ),
)
def align(
    given: Input, columns: Columns, how: How, output: Output, moved: Moved, compute: Compute, display: Display
) -> None:
    """Fit the heads of a merged model to its encoder.

    Inputs need no labels: the experts say what the heads should answer. The encoder stays as it is, and most aligners
    add no parameters.
    """
    from orthomerge.api.align import align as fit_heads
    from orthomerge.api.load import resolve
    from orthomerge.api.request import read_options
    from orthomerge.cli.progress import shown
    from orthomerge.cli.writing import write
    from orthomerge.data.reading import sources_of
    from orthomerge.files.publish import check_target
    from orthomerge.models.encoding import Encoding
    from orthomerge.runs.models import existing_paths

    options = read_options(how.settings)
    model, _ = resolve(given.model)
    data = sources_of(columns.of(given.data), model.tasks)
    inputs = existing_paths([given.model, *data.values(), *moved.expert.values(), moved.base])
    check_target(Path(output.out), force=output.force, inputs=inputs)
    with shown(quiet=display.silent) as progress:
        aligned = fit_heads(
            given.model,
            data,
            aligner=how.aligner,
            options=options,
            experts=moved.expert,
            base=moved.base,
            split=given.split,
            limit=given.limit,
            seed=how.seed,
            encoding=Encoding(device=compute.device, batch=compute.batch),
            progress=progress,
        )
        manifest = write(aligned, output.out, force=output.force, inputs=inputs, progress=progress)
    if display.json:
        print_json({"out": output.out, "manifest": manifest})
        return
    print_alignment(manifest)
    click.echo(f"wrote {output.out}, verified")


def print_alignment(manifest: dict[str, Any]) -> None:
    """One line per task: number of inputs, facts of the aligner, and parameters added."""
    about = manifest["alignment"]
    for task, results in about["tasks"].items():
        facts = ", ".join(f"{name} {_shown(value)}" for name, value in results["facts"].items()) or "no facts"
        added = results["extra"]["parameters"]
        grown = f"{added:,} parameters added" if added else "nothing added"
        click.echo(f"{task}: {about['aligner']} on {results['inputs']} inputs of {about['split']}; {facts}; {grown}")
    for note in manifest["notes"]:
        click.echo(f"note: {note}")


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
