"""The command `analogy`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import click

from orthomerge.cli.flags import Flag, command
from orthomerge.cli.options import Base, Compute, Display, Dtype, Experts, Force, Grid
from orthomerge.cli.printing import print_json, print_tables, score_cell
from orthomerge.core.errors import RecipeError
from orthomerge.core.table import Table

if TYPE_CHECKING:
    from orthomerge.evaluation.editing import Analogy


@dataclass(frozen=True, kw_only=True)
class Input:
    """Three experts, and labelled data of the fourth task."""

    experts: Experts = ()
    base: Base = None
    of: Annotated[str, Flag("A is to B as C is to the task of --data.", "A:B::C")]
    data: Annotated[dict[str, str], Flag("Labelled validation and test data of the new task.", "TASK=PATH")]


@dataclass(frozen=True)
class How:
    """Which coefficients are tried."""

    independent: Annotated[bool, Flag("One coefficient for C and one for B - A: all pairs of the grid.")] = False
    grid: Grid = None


@dataclass(frozen=True)
class Output:
    """What is written."""

    out: Annotated[str | None, Flag("Folder to write.", "FOLDER", short="-o", default="none, scores only")] = None
    dtype: Dtype = None
    force: Force = False


@command(
    usage=("analogy EXPERT... --base BASE --of A:B::C --data TASK=PATH [OPTIONS]",),
    examples=("analogy a b c --base base --of a:b::c --data d=d.csv --out d",),
)
def analogy(given: Input, how: How, output: Output, compute: Compute, display: Display) -> None:
    """Make a model for a task without training data.

    C + (B - A), scored with the head of C. An expert of the task itself is the ceiling.
    """
    from orthomerge.api.analogy import analogy as search
    from orthomerge.cli.progress import shown
    from orthomerge.cli.writing import open_request, write_edited
    from orthomerge.evaluation.editing import Form
    from orthomerge.models.encoding import Encoding

    form = Form.parse(given.of)
    if len(given.data) > 1:
        raise RecipeError(f"an analogy makes one task, got --data of {len(given.data)}")
    ((task, source),) = given.data.items()
    request, experts = open_request(
        given.experts, force=output.force, base=given.base, out=output.out, dtype=output.dtype
    )
    with shown(quiet=display.silent) as progress:
        result = search(
            experts,
            form,
            task,
            source,
            independent=how.independent,
            dtype=request.dtype,
            seed=request.seed,
            encoding=Encoding(None, compute.device, batch=compute.batch),
            progress=progress,
            **({} if how.grid is None else {"grid": how.grid}),
        )
        if display.json:
            print_json({**asdict(result.search), "out": None if result.model is None else request.out})
        else:
            _print(result.search, form.a, form.b, form.c)
        write_edited(
            result.model,
            request,
            data=[source],
            force=output.force,
            as_json=display.json,
            progress=progress,
            otherwise=f"nothing of the grid is better for {task!r} than the base itself, so {request.out} was not "
            "written; give another --grid, or another analogy",
        )


def _print(search: Analogy, a: str, b: str, c: str) -> None:
    best = search.best
    rows = {
        "base": search.base,
        f"fine-tuned on {c}": search.auxiliary,
        "analogy, unscaled": search.unscaled,
        f"analogy, {best.scale:g} and {best.shift:g}": search.edited,
        **({f"fine-tuned on {search.task}": search.expert} if search.expert is not None else {}),
    }
    columns = ("test accuracy", search.task)
    print_tables([Table.of("", columns, ((title, score_cell(score)) for title, score in rows.items()), left=2)])
    click.echo(
        f"{best.scale:g} {c} + {best.shift:g} ({b} - {a}), scored with the head of {c}; "
        f"coefficients chosen on validation data of {search.task}"
    )
    if best.scale == best.shift == 0:
        click.echo("that is the base: nothing of the grid is better")
