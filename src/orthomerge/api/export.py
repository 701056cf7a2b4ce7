from pathlib import Path
from typing import Literal

from orthomerge.core.errors import RecipeError, nearest
from orthomerge.models.model import Model
from orthomerge.models.saved import resolve

FORMATS = ("transformers", "onnx")


def export(
    model: Model | str | Path,
    out: str | Path,
    *,
    task: str | None = None,
    format: Literal["transformers", "onnx"] = "transformers",  # noqa: A002 - the name of the flag
    force: bool = False,
) -> dict[str, object]:
    """Write one task for transformers, or one or all as an ONNX graph; return the task, or inputs and outputs."""
    if format not in FORMATS:
        raise RecipeError(f"'format' must be transformers or onnx, got {format!r}; {nearest(format, FORMATS)}")
    value, folder = resolve(model)
    target, inputs = Path(out), () if folder is None else (folder,)
    if format == "onnx":
        from orthomerge.models.onnx import export_onnx

        return export_onnx(value, target, task=task, force=force, inputs=inputs)
    if task is None:
        raise RecipeError("a transformers classifier has one head; give the 'task', or format='onnx'")
    from orthomerge.models.writing import write_stock

    write_stock(value, task, target, force=force, inputs=inputs)
    return {"task": task}
