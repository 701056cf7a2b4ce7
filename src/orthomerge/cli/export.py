"""The command `export`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import click

from orthomerge.cli.flags import Flag, command
from orthomerge.cli.options import Display, Force
from orthomerge.cli.printing import print_json
from orthomerge.core.errors import RecipeError


@dataclass(frozen=True)
class Input:
    """What is exported."""

    model: Annotated[str, Flag("Folder of a merged model.", "MODEL", positional=True)]
    task: Annotated[str | None, Flag("Task whose head is put on the encoder.", "TASK")] = None
    all_heads: Annotated[bool, Flag("One ONNX graph with an output per task.")] = False


@dataclass(frozen=True)
class Output:
    """What is written."""

    out: Annotated[str, Flag("Folder to write.", "FOLDER", short="-o")]
    format: Annotated[Literal["transformers", "onnx"], Flag("onnx needs orthomerge[onnx].")] = "transformers"
    force: Force = False


@command(
    usage=("export MODEL --task TASK --out FOLDER [OPTIONS]",),
    examples=("export merged --task topic --out topic-merged", "export merged --all-heads --format onnx --out onnx"),
)
def export(given: Input, output: Output, display: Display) -> None:
    """Write stock transformers folders or ONNX graphs.

    A folder of one task loads as an ordinary classifier, also in pipeline().
    """
    from orthomerge.api.export import export as write

    if given.all_heads and output.format != "onnx":
        raise RecipeError("a stock classifier has one head: give --task, or --format onnx with --all-heads")
    if (given.task is None) != given.all_heads:
        either = " or --all-heads, not both" if given.all_heads else ", or --all-heads for onnx"
        raise RecipeError(f"give --task TASK{either}")
    about: Any = write(given.model, output.out, task=given.task, format=output.format, force=output.force)
    if display.json:
        print_json({"out": output.out, **about})
    elif output.format == "transformers":
        click.echo(f"wrote {output.out}: load it with transformers, or pipeline(..., model={output.out!r})")
    else:
        click.echo(
            f"wrote {output.out}/model.onnx: inputs {', '.join(about['inputs'])}; outputs "
            f"{', '.join(about['outputs'])}; logits are within {max(about['gap'].values()):.1e} of torch's in "
            "onnxruntime"
        )
