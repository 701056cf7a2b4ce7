from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated

import orthomerge as om
from orthomerge.cli.flags import How, Input, Parts, command
from orthomerge.cli.options import Edit
from orthomerge.cli.printing import score_cell
from orthomerge.core.errors import RecipeError
from orthomerge.core.progress import Progress
from orthomerge.core.table import Table


@command(
    "analogy a b c --base base --of a:b::c --data d=d.csv --out d",
    usage=("analogy EXPERT... --base BASE --of A:B::C --data TASK=PATH [OPTIONS]",),
)
def analogy(
    *,
    edit: Edit,
    of: Annotated[str, Input("A is to B as C is to the task of --data.", "A:B::C")],
    data: Annotated[Mapping[str, str], Input("Labelled validation and test data of the new task.", "TASK=PATH")],
    independent: Annotated[bool, How("Search separate coefficients for C and B - A.")] = False,
    progress: Progress,
) -> Parts:
    """Make a model for a task without training data.

    The model is C + (B - A) with the head of C. An expert of the task itself, if given, is scored for comparison.
    """
    from orthomerge.evaluation.editing import Form

    form = Form.parse(of)
    if len(data) > 1:
        raise RecipeError(f"an analogy is for one task, got --data of {len(data)}")
    ((task, source),) = data.items()
    request, experts, options = edit.open(progress)
    result = om.analogy(experts, form, task, source, independent=independent, **options)
    yield {**asdict(result.search), "out": None if result.model is None else request.out}
    search, best = result.search, result.search.best
    rows = {
        "base": search.base,
        f"fine-tuned on {form.c}": search.auxiliary,
        "analogy, unscaled": search.unscaled,
        f"analogy, {best.scale:g} and {best.shift:g}": search.edited,
    }
    if search.expert is not None:
        rows[f"fine-tuned on {task}"] = search.expert
    yield Table.of("", ("test accuracy", task), ((title, score_cell(score)) for title, score in rows.items()), left=2)
    yield (
        f"{best.scale:g} {form.c} + {best.shift:g} ({form.b} - {form.a}), scored with the head of {form.c}; "
        f"coefficients chosen on validation data of {task}"
    )
    failure = f"nothing of the grid is better for {task!r} than the base itself"
    if result.model is None:
        yield f"that is the base: {failure}"
    yield from edit.write(result.model, request, data=[source], failure=failure, progress=progress)
