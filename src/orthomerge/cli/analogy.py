"""The command `analogy`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import click

import orthomerge as om
from orthomerge.cli.editing import open_request, write_edited
from orthomerge.cli.flags import How, Input, command
from orthomerge.cli.options import Base, Compute, Display, Dtype, Experts, Force, Grid, OutIfAny
from orthomerge.cli.printing import print_json, print_tables, score_cell
from orthomerge.core.errors import RecipeError
from orthomerge.core.table import Table

if TYPE_CHECKING:
    from orthomerge.evaluation.editing import Analogy, Form


@command(
    usage=("analogy EXPERT... --base BASE --of A:B::C --data TASK=PATH [OPTIONS]",),
    examples=("analogy a b c --base base --of a:b::c --data d=d.csv --out d",),
)
def analogy(
    *,
    experts: Experts = (),
    base: Base = None,
    of: Annotated[str, Input("A is to B as C is to the task of --data.", "A:B::C")],
    data: Annotated[Mapping[str, str], Input("Labelled validation and test data of the new task.", "TASK=PATH")],
    independent: Annotated[bool, How("Search separate coefficients for C and B - A.")] = False,
    grid: Grid = None,
    out: OutIfAny = None,
    dtype: Dtype = None,
    force: Force = False,
    compute: Compute,
    display: Display,
) -> None:
    """Make a model for a task without training data.

    The model is C + (B - A) with the head of C. An expert of the task itself, if given, is scored for comparison.
    """
    from orthomerge.evaluation.editing import Form

    form = Form.parse(of)
    if len(data) > 1:
        raise RecipeError(f"an analogy is for one task, got --data of {len(data)}")
    ((task, source),) = data.items()
    request, opened = open_request(experts, force=force, base=base, out=out, dtype=dtype)
    with display.progress() as progress:
        result = om.analogy(
            opened,
            form,
            task,
            source,
            independent=independent,
            dtype=request.dtype,
            seed=request.seed,
            encoding=compute.encoding(cached=False),
            progress=progress,
            **({} if grid is None else {"grid": grid}),
        )
        if display.json:
            print_json({**asdict(result.search), "out": None if result.model is None else request.out})
        else:
            _print(result.search, form)
        write_edited(
            result.model,
            request,
            data=[source],
            force=force,
            as_json=display.json,
            progress=progress,
            reason=f"nothing of the grid is better for {task!r} than the base itself, so {request.out} was not "
            "written; give another --grid, or another analogy",
        )


def _print(search: Analogy, form: Form) -> None:
    best = search.best
    rows = {
        "base": search.base,
        f"fine-tuned on {form.c}": search.auxiliary,
        "analogy, unscaled": search.unscaled,
        f"analogy, {best.scale:g} and {best.shift:g}": search.edited,
    }
    if search.expert is not None:
        rows[f"fine-tuned on {search.task}"] = search.expert
    columns = ("test accuracy", search.task)
    print_tables([Table.of("", columns, ((title, score_cell(score)) for title, score in rows.items()), left=2)])
    click.echo(
        f"{best.scale:g} {form.c} + {best.shift:g} ({form.b} - {form.a}), scored with the head of {form.c}; "
        f"coefficients chosen on validation data of {search.task}"
    )
    if best.scale == best.shift == 0:
        click.echo("that is the base: nothing of the grid is better")
