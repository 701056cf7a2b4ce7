"""Export of a model as an ONNX graph: the encoder with one head, or with all heads and one output per task.

The graph, in float32, is run in onnxruntime on other batches and lengths, and kept only if its logits agree.

TO/model.onnx               inputs as the tokenizer or image processor names them; batch (and sequence) are dynamic
TO/config.json              if one task is exported: its labels, as transformers writes them
TO/orthomerge-export.json   tasks with their labels, inputs, and the largest differences from torch
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from orthomerge.core.errors import NumericalError, OutputError, RecipeError, summary
from orthomerge.core.version import VERSION
from orthomerge.files.documents import write_json
from orthomerge.files.folders import EXPORT, write_marker
from orthomerge.files.publish import publish
from orthomerge.models.family import classifier_config
from orthomerge.models.heads import Head
from orthomerge.models.model import Model
from orthomerge.models.skeleton import quiet

_MODEL = "model.onnx"
_ALTERNATIVE = "use `orthomerge export` without --format onnx"
_TOLERANCE = 1e-4  # between logits
_LARGE = 1_500_000_000  # bytes above which the weights get a file of their own: protobuf is limited to 2 GB
_IDS = ("input_ids", "attention_mask")
_INPUTS: Mapping[str, tuple[str, ...]] = {
    "bert": (*_IDS, "token_type_ids"),
    "electra": (*_IDS, "token_type_ids"),
    "roberta": _IDS,
    "xlm_roberta": _IDS,
    "camembert": _IDS,
    "distilbert": _IDS,
    "vit": ("pixel_values",),
    "deit": ("pixel_values",),
}
_SIZES = ((2, 7), (1, 3), (3, 8), (2, 17))  # inputs and tokens of the batch of the export, and of those compared


def export_onnx(
    model: Model, out: Path, *, task: str | None = None, force: bool = False, inputs: tuple[Path, ...] = ()
) -> dict[str, Any]:
    """Export one task (None: all) and return the marker's content. `inputs`: paths that `out` must not overlap."""
    family, config = model.family, model.config
    heads = {name: model.head(name) for name in (model.tasks if task is None else [task])}
    for name, head in heads.items():
        if not isinstance(head, Head):
            raise RecipeError(
                f"the classifier of {name!r} has a module before the head, which the ONNX export does not support; use "
                "orthomerge.load, or align the merge with an aligner that returns a head, such as auto"
            )
    if family.name not in _INPUTS:
        raise RecipeError(
            f"ONNX export supports {', '.join(_INPUTS)}, got a model of family {family.name!r}; {_ALTERNATIVE}, "
            "or orthomerge.load"
        )
    for needed in ("onnx", "onnxruntime", "onnxscript"):
        if find_spec(needed) is None:
            raise RecipeError(f"ONNX export needs {needed}; pip install 'orthomerge[onnx]'")
    names = _INPUTS[family.name]
    outputs = {"logits": task} if task is not None else {name: name for name in heads}
    size = sum(spec.nbytes for spec in model.weights.specs.values())
    with publish(out, force=force, need=3 * size, inputs=inputs, marker=EXPORT) as folder:
        graph = _graph(model.with_heads(heads), names)
        batch, *others = (_sample(config, names, count, length) for count, length in _SIZES)
        _write(graph, batch, list(outputs), folder / _MODEL)
        model.processor.write(folder)
        if task is not None:
            write_json(folder / "config.json", classifier_config(config, family, heads[task].labels, "float32"))
        return write_marker(
            folder,
            EXPORT,
            kind="onnx",
            orthomerge=VERSION,
            model=model.digest,
            inputs=list(names),
            outputs=outputs,
            labels={name: list(head.labels) for name, head in heads.items()},
            gap=_gaps(graph, others, list(heads), folder / _MODEL),
        )


def _graph(model: Model, inputs: tuple[str, ...]) -> torch.nn.Module:
    """Build the model in float32 with positional inputs and a tuple of logits as output."""

    class Graph(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model.module("cpu", torch.float32)

        def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(self.model(**dict(zip(inputs, values, strict=True))).values())

    return Graph().eval()


def _sample(config: Mapping[str, Any], inputs: tuple[str, ...], count: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    if inputs == ("pixel_values",):
        side = config.get("image_size", 224)
        height, width = side if isinstance(side, list | tuple) else (side, side)
        return {"pixel_values": torch.randn(count, config.get("num_channels", 3), height, width, generator=generator)}
    # RoBERTa's positions start at two.
    length = max(1, min(length, int(config.get("max_position_embeddings", 512)) - 2))
    ids = torch.randint(5, max(6, int(config.get("vocab_size", 100))), (count, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, (length + 1) // 2 :] = 0
    ids[mask == 0] = int(config.get("pad_token_id") or 0)
    batch = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    return {name: batch[name] for name in inputs}


def _write(graph: torch.nn.Module, batch: Mapping[str, torch.Tensor], outputs: list[str], path: Path) -> None:
    dynamic_axes = tuple({0: "batch"} | ({1: "sequence"} if name != "pixel_values" else {}) for name in batch)
    try:
        with _without_warnings(), torch.no_grad():
            torch.onnx.export(
                graph,
                tuple(batch.values()),
                path,
                input_names=list(batch),
                output_names=outputs,
                dynamic_shapes={"values": dynamic_axes},
                dynamo=True,
                external_data=sum(tensor.nbytes for tensor in graph.state_dict().values()) > _LARGE,
                verbose=False,
            )
    except Exception as error:  # the exporter passes on errors of any class
        raise OutputError(f"torch cannot export this model to ONNX ({summary(error)}); {_ALTERNATIVE}") from error


def _gaps(
    graph: torch.nn.Module, batches: Iterable[Mapping[str, torch.Tensor]], tasks: list[str], path: Path
) -> dict[str, float]:
    """Largest difference by task between the logits of torch and onnxruntime; a large one is an error."""
    import onnxruntime

    gaps = dict.fromkeys(tasks, 0.0)
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        for batch in batches:
            outputs = session.run(None, {name: tensor.numpy() for name, tensor in batch.items()})
            with torch.no_grad():
                expected = graph(*batch.values())
            for task, ours, theirs in zip(tasks, expected, outputs, strict=True):
                gaps[task] = max(gaps[task], float((ours - torch.from_numpy(theirs)).abs().max()))
    except Exception as error:  # of any class, as above
        raise OutputError(f"onnxruntime cannot run the exported graph ({summary(error)}); {_ALTERNATIVE}") from error
    for task, gap in gaps.items():
        if not gap <= _TOLERANCE:
            raise NumericalError(
                f"the logits of {task!r} differ by {gap:.1e} between torch and onnxruntime, more than {_TOLERANCE:g}, "
                f"so the graph was not kept; {_ALTERNATIVE}"
            )
    return gaps


@contextmanager
def _without_warnings() -> Iterator[None]:
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
