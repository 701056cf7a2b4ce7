from typing import Annotated, Any

import orthomerge as om
from orthomerge.cli.flags import How, Input, Output, Parts, command
from orthomerge.cli.options import Columns, Labelled, Limit, Saved, Suite, SuiteFolder
from orthomerge.cli.printing import verdict_lines
from orthomerge.core.errors import RecipeError
from orthomerge.core.progress import Progress


@command(
    "diagnose merged --data texts --out run",
    "diagnose --suite digits --method ties --scales",
    usage=("diagnose MODEL --data FOLDER [OPTIONS]", "diagnose [MODEL] --suite SUITE [OPTIONS]"),
)
def diagnose(
    *,
    model: Annotated[str | None, Input("Folder of a merged model.", "MODEL", positional=True)] = None,
    data: Labelled = None,
    suite: Suite = None,
    folder: SuiteFolder = None,
    method: Annotated[str, Input("Merge of the suite if no MODEL is given.", "NAME")] = "task_arithmetic",
    limit: Limit = None,
    columns: Columns,
    aligner: Annotated[str, How("Aligner (`list aligners`).", "NAME")] = "auto",
    points: Annotated[int, How("Inputs per task for t-SNE; 0 to skip it.", "N")] = 400,
    layers: Annotated[int, How("Inputs per task for CKA; 0 to skip it.", "N")] = 512,
    scales: Annotated[bool, How("Also merge at scales from 0.1 to 1 (slow).")] = False,
    seed: Annotated[int, How("Random seed.", "N")] = 0,
    out: Annotated[
        str, Output("Run folder: records are read, diagnosis.json is written.", "FOLDER", short="-o")
    ] = "runs/evaluation",
    saved: Saved,
    progress: Progress,
) -> Parts:
    """Explain what a merge lost, and what to try next.

    Tells how much is misalignment that new heads recover, how much is gone, and which experts conflict.
    """
    from orthomerge.analysis.detail import Detail
    from orthomerge.api.suite import diagnose_suite

    detail = Detail(aligner=aligner, points=points, layers=layers, limit=limit, seed=seed)
    sources = columns.of(data)
    options: dict[str, Any] = {"detail": detail, "scales": scales, "out": out, "progress": progress}
    if suite is not None:
        place = {"folder": folder, "data": sources, "say": progress.say}
        diagnosis = diagnose_suite(
            suite, model, method=method, place=place, device=saved.device, batch=saved.batch, **options
        )
    elif model and data:
        diagnosis = om.diagnose(model, sources, **saved.options(), **options)
    else:
        raise RecipeError("give a suite, or the folder of a merged model with --data TASK=PATH of each task")
    yield {"method": diagnosis.method, "verdict": [vars(finding) for finding in diagnosis.verdict], "run": out}
    yield from verdict_lines(diagnosis)
    yield f"{len(diagnosis.figures)} figures and their numbers are in {out}/diagnosis.json"
