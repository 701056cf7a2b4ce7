"""The command `export`: parse, call the library, say how to load what was written."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from orthomerge.cli.options import Force
from orthomerge.core.errors import RecipeError, nearest


def export(
    path: Annotated[str, typer.Argument(help="A folder that `orthomerge merge` wrote.")],
    to: Annotated[str, typer.Option("--to", help="The folder to write.")],
    task: Annotated[str | None, typer.Option("--task", help="Whose head to put on the encoder.")] = None,
    form: Annotated[
        str, typer.Option("--format", help="transformers, or onnx (needs the extra `onnx`).")
    ] = "transformers",
    all_heads: Annotated[
        bool, typer.Option("--all-heads", help="For onnx: one graph, one output for each task.")
    ] = False,
    force: Force = False,
) -> None:
    """Write one task as an ordinary transformers classifier folder, or as an ONNX graph."""
    from orthomerge.api.export import FORMATS
    from orthomerge.api.export import export as write

    if form not in FORMATS:
        raise RecipeError(f"--format must be transformers or onnx, got {form!r}; {nearest(form, FORMATS)}")
    if all_heads and form != "onnx":
        raise RecipeError("a stock classifier has one head: give --task, or --format onnx with --all-heads")
    if (task is None) != all_heads:
        raise RecipeError(
            "give --task TASK" + (" or --all-heads, not both" if all_heads else ", or --all-heads for onnx")
        )
    if form == "transformers":
        write(path, to, task=task, force=force)
        typer.echo(f"wrote {to}: load it with transformers, or pipeline(..., model={to!r})")
        return
    about: Any = write(path, to, task=task, format="onnx", force=force)
    typer.echo(
        f"wrote {to}/model.onnx: inputs {', '.join(about['inputs'])}; outputs {', '.join(about['outputs'])}; logits "
        f"are within {max(about['gap'].values()):.1e} of torch's in onnxruntime"
    )
