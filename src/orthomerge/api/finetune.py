from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from orthomerge.api.open import open as open_named
from orthomerge.core.progress import SILENT, Progress
from orthomerge.core.schema import build
from orthomerge.data.reading import read_task
from orthomerge.files.opening import locate
from orthomerge.models.model import Model
from orthomerge.models.processors import load_processor
from orthomerge.tuning.finetune import finetune as train
from orthomerge.tuning.settings import Tuning


def finetune(
    base: str | Path,
    data: Any,
    out: str | Path,
    *,
    others: Iterable[Any] = (),
    force: bool = False,
    progress: Progress = SILENT,
    **tuning: Any,
) -> Model:
    """Fine-tune a base on a labelled task, write the expert to `out` and open it.

    `data`: a `Task` or what `read_data` reads. `others`: data of other tasks, for the mode `tau_jp`. `tuning`: fields
    of `Tuning`, such as `mode`, `epochs` and `lr`. The metrics of the last epoch are in `origin.facts`.
    """
    metrics = write_expert(base, data, out, tuning, others=others, force=force, progress=progress)
    model = next(iter(open_named([out], base=base).check().sources.values()))
    return replace(model, origin=replace(model.origin, facts={**model.origin.facts, "metrics": metrics}))


def write_expert(
    base: str | Path, data: Any, out: str | Path, tuning: Mapping[str, Any], *, others: Iterable[Any] = (), **how: Any
) -> dict[str, float]:
    """Fine-tune a base, write the expert, and return the metrics of the last epoch. `how`: `force` and `progress`."""
    settings = build(Tuning, tuning, where="finetune")
    others = tuple(others)
    task = read_task(data)
    folder, _ = locate(str(base))
    paths = (Path(source).expanduser() for source in (data, *others) if isinstance(source, str | Path))
    return train(
        task,
        base=folder,
        out=Path(out),
        settings=settings,
        processor=load_processor(folder, modality=task.modality, max_length=settings.max_length),
        others=[read_task(other)["train"].unlabelled() for other in others],
        inputs=[path for path in paths if path.exists()],
        **how,
    )
