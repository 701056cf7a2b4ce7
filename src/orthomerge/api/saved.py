"""Load, inspect, export and upload saved models."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from orthomerge.core.errors import OutputError, RecipeError, nearest
from orthomerge.models.inspection import inspect_checkpoint
from orthomerge.models.model import Model
from orthomerge.models.pushing import plan_upload, send
from orthomerge.models.saved import read_model, resolve, verify_folder

FORMATS = ("transformers", "onnx")


def load(path: str | Path, *, verify: bool = True) -> Model:
    """Load a folder that `merge` wrote. Every byte that is used is compared with its recorded hash."""
    return read_model(Path(path).expanduser(), verify=verify)


def inspect(path: str | Path, *, headers: bool = False, verify: bool = False) -> dict[str, Any]:
    """Describe a checkpoint, an adapter or a merged model: family, tensors, dtypes, head, hashes, number of NaN.

    `headers`: do not read the weights. `verify`: only compare the files of a merged model with their recorded hashes.
    """
    if not verify:
        return inspect_checkpoint(str(path), headers=headers)
    if headers:
        raise RecipeError("--verify reads every file: leave --headers out")
    problems = verify_folder(Path(path))
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise OutputError(f"{path} is not what was written:\n{lines}\nmerge again, or fetch it again")
    return {"path": str(path), "ok": True}


def export(
    model: Model | str | Path,
    out: str | Path,
    *,
    task: str | None = None,
    format: Literal["transformers", "onnx"] = "transformers",  # noqa: A002 - the word of the command line
    force: bool = False,
) -> dict[str, object]:
    """Write one task as a folder that a stock class loads, or one task or all as an ONNX graph.

    Return the inputs and outputs of the graph, or the task.
    """
    if format not in FORMATS:
        raise RecipeError(f"'format' must be transformers or onnx, got {format!r}; {nearest(format, FORMATS)}")
    value, folder = resolve(model)
    target, inputs = Path(out), () if folder is None else (folder,)
    if format == "onnx":
        from orthomerge.models.onnx import export_onnx

        return export_onnx(value, target, task=task, force=force, inputs=inputs)
    if task is None:
        raise RecipeError("a stock classifier has one head: name the 'task', or write ONNX")
    from orthomerge.models.writing import write_stock as write

    write(value, task, target, force=force, inputs=inputs)
    return {"task": task}


def push(model: Model | str | Path, repo: str, *, private: bool = False, revision: str | None = None) -> str:
    """Upload a model, or a folder that verifies, to `repo` (org/name) on the Hub; return the address of the commit.

    `private`: of a new repository. `revision`: a branch, main if None. The token is HF_TOKEN, or of `hf auth login`.
    """
    if not isinstance(model, Model):
        return send(plan_upload(model, repo, private=private, revision=revision))
    with TemporaryDirectory() as folder:
        out = Path(folder) / "model"
        model.save(out)
        return send(plan_upload(out, repo, private=private, revision=revision))
