from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import orthomerge as om
from orthomerge.cli.flags import How, Input, Parts, command
from orthomerge.cli.options import Columns, Edit, Labelled
from orthomerge.cli.printing import score_cell
from orthomerge.core.progress import Progress
from orthomerge.core.table import Table

if TYPE_CHECKING:
    from orthomerge.evaluation.editing import Negated


@command(
    "negate toxic tone --base base --target toxic --data texts -o kinder",
    usage=("negate EXPERT... --base BASE --target TASK --data FOLDER [OPTIONS]",),
)
def negate(
    *,
    edit: Edit,
    target: Annotated[str, Input("Task to forget.", "TASK")],
    data: Labelled = None,
    columns: Columns,
    control: Annotated[tuple[str, ...], How("Task to keep, repeated.", "TASK", default="all others with data")] = (),
    heads: Annotated[
        Literal["probe", "expert"], How("Score with probes on the base's features, or with the experts' heads.")
    ] = "probe",
    keep: Annotated[float, How("Share of the base's control accuracy to keep.", "SHARE")] = 0.95,
    progress: Progress,
) -> Parts:
    """Forget a task: the base minus its task vector.

    The scale is the best that keeps the control tasks; a random vector of the same length is scored for comparison.
    """
    from orthomerge.data.reading import sources_of

    request, experts, options = edit.open(progress)
    sources = sources_of(columns.of(data), [*dict.fromkeys((target, *control, *experts.tasks))])
    result = om.negate(experts, target, sources, controls=control or None, heads=heads, keep=keep, **options)
    yield {
        "heads": heads,
        "negated": {**asdict(result.search), "kept": result.search.kept},
        "random": {**asdict(result.random), "kept": result.random.kept},
        "out": None if result.model is None else request.out,
    }
    yield _table(result)
    reader = "probes on the base's features" if heads == "probe" else "the experts' heads"
    yield f"scored with {reader}; scales chosen on validation data, where {keep:.0%} of the control must be kept"
    failure = f"nothing of the grid forgets {target!r} and keeps {keep:.0%} of the control"
    if result.model is None:
        yield f"scale 0 is the base: {failure}"
    yield from edit.write(result.model, request, data=sources.values(), failure=failure, progress=progress)


def _table(result: Negated) -> Table:
    search = result.search
    tasks = (search.target, *search.controls)
    rows = [("base", "", *(score_cell(search.base[task]) for task in tasks), "")]
    for title, line in ((f"minus {search.target}", search), ("random vector", result.random)):
        rows.append((title, f"{line.scale:g}", *(score_cell(line.edited[task]) for task in tasks), f"{line.kept:.1%}"))
    columns = ("test accuracy", "scale", *tasks, "control kept")
    return Table.of("", columns, rows, left=len(columns))
