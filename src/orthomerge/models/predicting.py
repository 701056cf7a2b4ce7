"""Raw inputs to labels, through the same encoder pass as an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from orthomerge.core.errors import RecipeError
from orthomerge.data.task import Examples
from orthomerge.models.encoding import Encoding, encode
from orthomerge.models.heads import head_of, logits_of
from orthomerge.models.kinds import Prediction, head_kind

if TYPE_CHECKING:
    from orthomerge.models.features import Features
    from orthomerge.models.heads import Head
    from orthomerge.models.model import Model


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
