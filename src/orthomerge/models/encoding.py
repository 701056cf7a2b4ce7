"""Features of inputs under a model's encoder, and what its heads predict from them.

Features are kept by content: the same weights never see the same inputs twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from orthomerge.core.device import device_of
from orthomerge.core.errors import RecipeError
from orthomerge.data.task import Examples
from orthomerge.models.extract import extract
from orthomerge.models.features import FeatureCache, FeatureKey, Features, Precision
from orthomerge.models.heads import head_of, logits_of
from orthomerge.models.kinds import Prediction, head_kind

if TYPE_CHECKING:
    import torch

    from orthomerge.models.heads import Head
    from orthomerge.models.model import Model
    from orthomerge.models.processing import Processor


@dataclass(frozen=True)
class Encoding:
    """How inputs are encoded. `cache`: None to compute anew. `processor`: instead of each model's own."""

    cache: FeatureCache | None = field(default_factory=FeatureCache)
    device: str = "auto"
    precision: Precision = "float32"
    batch: int = 64
    processor: Processor | None = None


def encode(
    model: Model, examples: Examples, *, task: str, head: Head | None = None, how: Encoding | None = None
) -> Features:
    """The features [n, d] that a head reads; `head`: the model's own for this task, if none is given."""
    how = how or Encoding()
    device_of(how.device)  # a device that does not exist is refused even where nothing is left to encode
    reader = head or head_of(model.head(task))
    pooling = reader.pooling or model.family.default_pooling
    processor = how.processor or model.processor.processor(reader.max_length)

    def compute() -> torch.Tensor:
        encoder, family = model.encoder.runner(pooling)
        options: dict[str, Any] = {"task": task, "batch": how.batch, "device": how.device, "autocast": how.precision}
        return extract(encoder, family, pooling, examples, processor, **options).values

    if how.cache is None:
        return Features.of(compute(), examples, task)
    key = FeatureKey.of(
        examples,
        processor,
        weights=model.digest,
        family=model.family.name,
        pooling=pooling,
        autocast=how.precision,
    )
    return Features.of(how.cache.get_or_make(key, compute), examples, task)


def predict(
    model: Model, inputs: Any, *, tasks: Sequence[str] | None = None, device: str = "auto", batch_size: int = 32
) -> dict[str, Prediction] | list[dict[str, Prediction]]:
    """See `Model.predict`."""
    heads = {task: model.head(task) for task in (model.tasks if tasks is None else tasks)}
    if not model.family.encoder_class:
        raise RecipeError("a module of your own cannot be built here: build it, load the weights, and run it yourself")
    if not heads:
        raise RecipeError("this model has no heads, so that there is nothing to predict; merge experts first")
    alone = not isinstance(inputs, Sequence) or isinstance(inputs, str)
    items = [_item(each, model.family.modality) for each in ([inputs] if alone else inputs)]
    if not items:
        return []
    examples, how = Examples(items, None, "test"), Encoding(None, device, batch=batch_size)
    passes: dict[tuple[str | None, int | None], Features] = {}
    rows: list[dict[str, Prediction]] = [{} for _ in items]
    for task, classifier in heads.items():
        head: Head = head_of(classifier)
        reading = (head.pooling, head.max_length)
        if reading not in passes:
            passes[reading] = encode(model, examples, task=task, head=head, how=how)
        logits = logits_of(classifier, passes[reading].values)
        for row, prediction in zip(rows, head_kind(head.kind).decode(logits, head.labels), strict=True):
            row[task] = prediction
    return rows[0] if alone else rows


def _item(value: Any, modality: str) -> Any:
    """One input as an evaluation reads it: a text, or pixels."""
    if modality == "text":
        if not isinstance(value, str):
            raise RecipeError(
                f"this model reads texts, got {type(value).__name__}; give a string, or a list of strings"
            )
        return value
    if isinstance(value, str | Path):
        from orthomerge.data.images import decode

        return decode(Path(value), where=str(value))
    if hasattr(value, "convert"):  # a PIL image
        from orthomerge.data.images import pixels

        return pixels(value, where="a PIL image")
    array = np.asarray(value)
    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        raise RecipeError(
            f"an image must be a path, a PIL image or uint8 pixels [H, W] or [H, W, 3], got {array.dtype} {array.shape}"
        )
    return array
