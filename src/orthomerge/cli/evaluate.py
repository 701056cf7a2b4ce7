from pathlib import Path
from typing import Annotated, Any, Literal

import orthomerge as om
from orthomerge.cli.flags import How, Input, Output, Parts, command
from orthomerge.cli.options import Columns, Labelled, Saved, Suite, SuiteFolder
from orthomerge.core.errors import RecipeError
from orthomerge.core.progress import Progress


@command(
    "evaluate merged aligned --data texts --out run",
    "evaluate merged --data topic=topic.csv --aligner ridge",
    "evaluate --suite digits --method 'ties: density: 0.3'",
    usage=("evaluate MODEL... --data FOLDER [OPTIONS]", "evaluate --suite SUITE [OPTIONS]"),
)
def evaluate(
    *,
    models: Annotated[tuple[str, ...], Input("Folders of merged models.", "MODEL...", positional=True)] = (),
    data: Labelled = None,
    suite: Suite = None,
    folder: SuiteFolder = None,
    method: Annotated[tuple[str, ...], Input("Merge of the suite, such as 'ties: density: 0.3', repeated.", "NAME")] = (
        "average",
        "task_arithmetic",
        "ties",
    ),
    columns: Columns,
    protocol: Annotated[tuple[str, ...], How("Protocol (`list protocols`), repeated.", "NAME")] = (
        "current",
        "knn",
        "aligned-c",
    ),
    aligner: Annotated[
        tuple[str, ...], How("Score with aligned heads too (`list aligners`), repeated.", "NAME", default="none")
    ] = (),
    shots: Annotated[tuple[str, ...], How("Inputs per class, a share such as 0.1, or all; repeated.", "N")] = ("all",),
    seeds: Annotated[int, How("Number of random draws of few shots.", "N")] = 5,
    access: Annotated[
        tuple[Literal["inductive", "transductive"], ...], How("Fit to inputs of train, or of test itself; repeated.")
    ] = ("inductive",),
    references: Annotated[bool, How("Score the experts too.")] = True,
    out: Annotated[str, Output("Run folder to write.", "FOLDER", short="-o")] = "runs/evaluation",
    against: Annotated[str | None, Output("Compare every model with this one.", "NAME", default="the best")] = None,
    margin: Annotated[float, Output("Models that differ by less may be comparable.", "POINTS")] = 1.0,
    saved: Saved,
    progress: Progress,
) -> Parts:
    """Compare merged models with their experts.

    Every score names the inputs that were used: none (data-free), inductive or transductive.
    """
    from orthomerge.api.evaluate import read_protocols
    from orthomerge.api.suite import evaluate_suite
    from orthomerge.evaluation.scores import check_run

    protocols = read_protocols(protocol, aligner, shots=shots, seeds=seeds, access=access)
    check_run(Path(out))
    sources = columns.of(data)
    options = dict[str, Any](protocols=protocols, against=against, margin=margin / 100, progress=progress)
    if suite is not None:
        place = {"folder": folder, "data": sources, "say": progress.say}
        scores = evaluate_suite(suite, method, place=place, device=saved.device, batch=saved.batch, **options)
    elif models and data:
        scores = om.evaluate(models, sources, references=["expert"] if references else [], **saved.options(), **options)
    else:
        raise RecipeError("give a suite, or folders of merged models and --data TASK=PATH for each task")
    scores.write(out)
    yield scores.as_dict()
    yield from scores.tables()
    for note in scores.notes:
        yield f"\nwarning: {note}"
    yield f"\nrecords, predictions, comparisons and the tables are in {out}"
