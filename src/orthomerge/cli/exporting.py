"""What `export` does once its arguments are read."""

from __future__ import annotations

import typer

from orthomerge.errors import RecipeError, nearest

__all__ = ["export"]

_FORMS = ("transformers", "onnx")


def export(path: str, *, task: str | None, to: str, form: str, all_heads: bool, force: bool) -> None:
    """Write, and say how to load it."""
    if form not in _FORMS:
        raise RecipeError(f"--format must be transformers or onnx, got {form!r}; {nearest(form, _FORMS)}")
    if all_heads and form != "onnx":
        raise RecipeError("a stock classifier has one head: give --task, or --format onnx with --all-heads")
    if (task is None) != all_heads:
        raise RecipeError(
            "give --task TASK" + (" or --all-heads, not both" if all_heads else ", or --all-heads for onnx")
        )
    if form == "transformers" and task is not None:
        from orthomerge.merged import export as write

        write(path, task, to, force=force)
        typer.echo(f"wrote {to}: load it with transformers, or pipeline(..., model={to!r})")
        return
    from orthomerge.onnx_export import export_onnx

    about = export_onnx(path, to, task=task, force=force)
    typer.echo(
        f"wrote {to}/model.onnx: inputs {', '.join(about['inputs'])}; outputs {', '.join(about['outputs'])}; logits "
        f"are within {max(about['gap'].values()):.1e} of torch's in onnxruntime"
    )
