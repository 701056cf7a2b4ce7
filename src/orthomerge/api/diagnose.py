from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orthomerge.analysis.detail import Detail
from orthomerge.analysis.diagnose import diagnose as compare
from orthomerge.analysis.diagnose import suggested_commands
from orthomerge.analysis.diagnosis import FILE, Diagnosis, write_diagnosis
from orthomerge.core.errors import OutputError, RecipeError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.data.reading import labelled_tasks, sources_of
from orthomerge.evaluation.records import Record, read_records
from orthomerge.evaluation.scale import ScaleSearch, scale_curve
from orthomerge.files.folders import check_claim, claim
from orthomerge.models.encoding import Encoding
from orthomerge.models.experts import Experts, reopen_experts
from orthomerge.models.model import Model
from orthomerge.models.saved import resolve


def diagnose(
    model: Model | str | Path,
    data: Mapping[str, Any] | str | Path,
    *,
    experts: Experts | Mapping[str, Any] | None = None,
    base: Any = None,
    detail: Detail | None = None,
    records: Sequence[Record] = (),
    scales: bool | ScaleSearch = False,
    commands: Mapping[str, str] | None = None,
    out: str | Path | None = None,
    encoding: Encoding | None = None,
    progress: Progress = SILENT,
) -> Diagnosis:
    """Measure how much of what a merge lost is misalignment, which new heads recover, and how much is gone.

    `data`: labelled test inputs and a train or val split by task, or a folder with a file per task. `experts`: the
    opened experts of the model; else they are opened at their recorded paths, or at those in `experts` and `base`.
    `records`: scores of the same model. `scales`: also merge at scales from 0.1 to 1. `commands`: commands that the
    verdict may suggest. `out`: a run folder, whose records are used too and where the diagnosis is written.
    """
    if out is not None:
        records = [*records, *_records(Path(out))]
    value, folder = resolve(model)
    sources = sources_of(data, value.tasks)
    tasks = labelled_tasks(sources, value.labels, value.family.modality)
    if not isinstance(experts, Experts):
        moved = experts or {}
        names = [task for task in value.tasks if task in tasks]
        experts = reopen_experts(value, folder=folder, base=base, experts=moved, tasks=names)
        if commands is None and folder is not None and all(isinstance(source, str) for source in sources.values()):
            aligner = "auto" if detail is None else detail.aligner
            commands = suggested_commands(str(model), sources, experts, aligner=aligner, base=base, moved=moved)
    search = scales if isinstance(scales, ScaleSearch) else None
    if scales is True:
        if not experts.has_base:
            raise RecipeError("--scales merges again, which needs the base; give --base too")
        search = scale_curve(experts, sources, encoding=encoding, progress=progress)
    diagnosis = compare(
        value,
        experts,
        tasks,
        detail=detail,
        records=records,
        search=search,
        commands=commands,
        how=encoding,
        progress=progress,
    )
    if out is not None:
        claim(Path(out), [FILE])
        write_diagnosis(Path(out) / FILE, diagnosis)
    return diagnosis


def _records(out: Path) -> list[Record]:
    """Return the records of a run folder, which is created if necessary and must be writable."""
    check_claim(out, [FILE])
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write the diagnosis to {out}: {error.strerror}; give another --out") from error
    return read_records(out / "records.jsonl") if (out / "records.jsonl").is_file() else []
