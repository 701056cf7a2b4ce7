"""The command `negate`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import click

import orthomerge as om
from orthomerge.cli.editing import open_request, write_edited
from orthomerge.cli.flags import How, Input, command
from orthomerge.cli.options import Base, Columns, Compute, Display, Dtype, Experts, Force, Grid, Labelled, OutIfAny
from orthomerge.cli.printing import print_json, print_tables, score_cell
from orthomerge.core.table import Table

if TYPE_CHECKING:
    from orthomerge.evaluation.editing import Negation


@command(
    usage=("negate EXPERT... --base BASE --target TASK --data FOLDER [OPTIONS]",),
    examples=("negate toxic --base base --target toxic --data texts --out kinder",),
)
def negate(
    *,
    experts: Experts = (),
    base: Base = None,
    target: Annotated[str, Input("Task to forget.", "TASK")],
    data: Labelled = None,
    columns: Columns,
    control: Annotated[tuple[str, ...], How("Task to keep, repeated.", "TASK", default="all others with data")] = (),
    heads: Annotated[
        Literal["probe", "expert"], How("Score with probes on the base's features, or with the experts' heads.")
    ] = "probe",
    keep: Annotated[float, How("Share of the base's control accuracy to keep.", "SHARE")] = 0.95,
    grid: Grid = None,
    out: OutIfAny = None,
    dtype: Dtype = None,
    force: Force = False,
    compute: Compute,
    display: Display,
) -> None:
    """Forget a task: the base minus its task vector.

    The scale is the best that keeps the control tasks; a random vector of the same length is scored for comparison.
    """
    from orthomerge.data.reading import sources_of

    request, opened = open_request(experts, force=force, base=base, out=out, dtype=dtype)
    sources = sources_of(columns.of(data), opened.tasks)
    with display.progress() as progress:
        result = om.negate(
            opened,
            target,
            sources,
            controls=control or None,
            heads=heads,
            keep=keep,
            dtype=request.dtype,
            seed=request.seed,
            encoding=compute.encoding(cached=False),
            progress=progress,
            **({} if grid is None else {"grid": grid}),
        )
        if display.json:
            searches = {"negated": result.search, "random": result.random}
            documents = {name: {**asdict(search), "kept": search.kept} for name, search in searches.items()}
            print_json({"heads": heads, **documents, "out": None if result.model is None else request.out})
        else:
            _print(result.search, result.random, heads)
        write_edited(
            result.model,
            request,
            data=sources.values(),
            force=force,
            as_json=display.json,
            progress=progress,
            reason=f"no scale of the grid forgets {target!r} and keeps {keep:.0%} of the control, so {request.out} "
            "was not written; give a finer --grid, or a smaller --keep",
        )


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
        click.echo("scale 0 is the base: nothing of the grid forgets the task and keeps the control")
