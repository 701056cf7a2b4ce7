from typing import Annotated, Any, Literal

import orthomerge as om
from orthomerge.cli.flags import Input, Output, Parts, command
from orthomerge.cli.options import Force, Out, SavedModel
from orthomerge.core.errors import RecipeError


@command(
    "export merged --task topic --out topic-merged",
    "export merged --all-heads --format onnx --out onnx",
    usage=("export MODEL --task TASK --out FOLDER [OPTIONS]",),
)
def export(
    *,
    model: SavedModel,
    task: Annotated[str | None, Input("Task whose head is exported.", "TASK")] = None,
    all_heads: Annotated[bool, Input("One ONNX graph with an output per task.")] = False,
    out: Out,
    format: Annotated[  # noqa: A002 - the name of the flag
        Literal["transformers", "onnx"], Output("onnx needs orthomerge[onnx].")
    ] = "transformers",
    force: Force = False,
) -> Parts:
    """Write folders for transformers, or ONNX graphs.

    A folder of one task loads as an ordinary classifier, also in pipeline().
    """
    if all_heads and format != "onnx":
        raise RecipeError("a transformers classifier has one head; give --task, or --format onnx with --all-heads")
    if (task is None) != all_heads:
        either = " or --all-heads, not both" if all_heads else ", or --all-heads for onnx"
        raise RecipeError(f"give --task TASK{either}")
    about: Any = om.export(model, out, task=task, format=format, force=force)
    yield {"out": out, **about}
    if format == "transformers":
        yield f"wrote {out}: load it with transformers, or pipeline(..., model={out!r})"
    else:
        yield (
            f"wrote {out}/model.onnx: inputs {', '.join(about['inputs'])}; outputs {', '.join(about['outputs'])}; "
            f"logits are within {max(about['gap'].values()):.1e} of torch's in onnxruntime"
        )
