"""The command `negate`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from orthomerge.cli.flags import Flag, command
from orthomerge.cli.options import Base, Columns, Compute, Display, Dtype, Experts, Force, Grid, Labelled
from orthomerge.cli.printing import print_json, print_tables, score_cell
from orthomerge.core.table import Table

if TYPE_CHECKING:
    from orthomerge.evaluation.editing import Negation


@dataclass(frozen=True, kw_only=True)
class Input:
    """Experts, and labelled data of the target and of what must be kept."""

    experts: Experts = ()
    base: Base = None
    target: Annotated[str, Flag("Task to forget.", "TASK")]
    data: Labelled = field(default_factory=dict)


@dataclass(frozen=True)
class How:
    """What is kept, and how tasks are scored."""

    control: Annotated[tuple[str, ...], Flag("Task to keep, repeated.", "TASK", default="all others with data")] = ()
    heads: Annotated[
        Literal["probe", "expert"], Flag("Score with probes on the base's features, or with the experts' heads.")
    ] = "probe"
    keep: Annotated[float, Flag("Share of the base's control accuracy to keep.", "SHARE")] = 0.95
    grid: Grid = None


@dataclass(frozen=True)
class Output:
    """What is written."""

    out: Annotated[str | None, Flag("Folder to write.", "FOLDER", short="-o", default="none, scores only")] = None
    dtype: Dtype = None
    force: Force = False


@command(
    usage=("negate EXPERT... --base BASE --target TASK --data FOLDER [OPTIONS]",),
    examples=("negate toxic --base base --target toxic --data texts --out kinder",),
)
def negate(given: Input, columns: Columns, how: How, output: Output, compute: Compute, display: Display) -> None:
    """Forget a task: the base minus its task vector.

    As far as control tasks allow, beside a random vector of the same length.
    """
    from orthomerge.api.negate import negate as search
    from orthomerge.cli.progress import shown
    from orthomerge.cli.writing import open_request, write_edited
    from orthomerge.data.reading import sources_of
    from orthomerge.models.encoding import Encoding

    request, experts = open_request(
        given.experts, force=output.force, base=given.base, out=output.out, dtype=output.dtype
    )
    sources = sources_of(columns.of(given.data), experts.tasks)
    with shown(quiet=display.silent) as progress:
        result = search(
            experts,
            given.target,
            sources,
            controls=how.control or None,
            heads=how.heads,
            keep=how.keep,
            dtype=request.dtype,
            seed=request.seed,
            encoding=Encoding(None, compute.device, batch=compute.batch),
            progress=progress,
            **({} if how.grid is None else {"grid": how.grid}),
        )
        if display.json:
            searches = {"negated": _document(result.search), "random": _document(result.random)}
            print_json({"heads": how.heads, **searches, "out": request.out if result.model is not None else None})
        else:
            _print(result.search, result.random, how.heads)
        write_edited(
            result.model,
            request,
            data=sources.values(),
            force=output.force,
            as_json=display.json,
            progress=progress,
            otherwise=f"no scale of the grid forgets {given.target!r} and keeps {how.keep:.0%} of the control, so "
            f"{request.out} was not written; give a finer --grid, or a smaller --keep",
        )


def _document(search: Negation) -> dict[str, Any]:
    return {**asdict(search), "kept": search.kept}


def _print(search: Negation, random: Negation, heads: str) -> None:
    reader = "probes on the base's features" if heads == "probe" else "the experts' heads"
    tasks = (search.target, *search.controls)
    rows = [("base", "", *(score_cell(search.base[task]) for task in tasks), "")]
    for title, result in ((f"minus {search.target}", search), ("random vector", random)):
        cells = (score_cell(result.edited[task]) for task in tasks)
        rows.append((title, f"{result.scale:g}", *cells, f"{result.kept:.1%}"))
    columns = ("test accuracy", "scale", *tasks, "control kept")
    print_tables([Table.of("", columns, rows, left=len(columns))])
    click.echo(
        f"scored with {reader}; scales chosen on validation data, where {search.keep:.0%} of the control must be kept"
    )
    if search.scale == 0:
        click.echo("scale 0 is the base: nothing of the grid forgets and keeps")
