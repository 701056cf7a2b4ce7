"""Features of inputs under a model's encoder, and predictions of its heads.

Features are cached by content: once per set of weights. No thread prepares inputs: it would compete for the GIL.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from orthomerge.core.checks import at_least_one, choices
from orthomerge.core.device import device_of, enough_memory
from orthomerge.core.errors import IncompatibleError, NumericalError, RecipeError, nearest
from orthomerge.data.reading import as_input
from orthomerge.data.task import Examples
from orthomerge.models.family import Family
from orthomerge.models.features import FeatureCache, Features
from orthomerge.models.heads import Head, Prediction, head_kind, head_of, logits_of
from orthomerge.models.model_data import ModelData
from orthomerge.models.processing import Processor, batches

# Dtype of autocast in the encoder; float32 means no autocast.
Precision = Literal["float32", "bfloat16", "float16"]
_FORMAT = 2  # version of the cache keys


@dataclass(frozen=True)
class Encoding:
    """Options of encoding. `cache`: None for no cache. `processor`: replaces the processor of each model."""

    cache: FeatureCache | None = field(default_factory=FeatureCache)
    device: str = "auto"
    precision: Precision = "float32"
    batch: int = 64
    processor: Processor | None = None

    def __post_init__(self) -> None:
        at_least_one(batch=self.batch)
        choices(self)


def encode(
    model: ModelData, examples: Examples, *, task: str, head: Head | None = None, how: Encoding | None = None
) -> Features:
    """Compute the features [n, d] that a head reads. `head`: by default the model's own for this task."""
    how = how or Encoding()
    device_of(how.device)  # refuses a missing device even if all features are cached
    head = head or head_of(model.head(task))
    pooling = head.pooling or model.family.default_pooling
    processor = how.processor or model.processor.processor(head.max_length)

    def compute() -> torch.Tensor:
        encoder, family = model.encoder.runner(pooling)
        return extract(encoder, family, pooling, examples, processor, task=task, how=how).values

    if how.cache is None:
        return Features.of(compute(), examples, task)
    key = {
        "format": _FORMAT,
        "weights": model.digest,
        "data": examples.digest(),
        "processor": processor.digest(),
        "family": model.family.name,
        "pooling": pooling,
        "precision": how.precision,
    }
    return Features.of(how.cache.get_or_compute(key, len(examples), compute), examples, task)


def predict(
    model: ModelData, inputs: Any, *, tasks: Sequence[str] | None = None, device: str = "auto", batch_size: int = 32
) -> dict[str, Prediction] | list[dict[str, Prediction]]:
    heads = {task: model.head(task) for task in (model.tasks if tasks is None else tasks)}
    if not model.family.encoder_class:
        raise RecipeError("a module of your own cannot be built here; build it, load the weights, and run it yourself")
    if not heads:
        raise RecipeError("this model has no heads, so it cannot predict; merge experts first")
    single = not isinstance(inputs, Sequence) or isinstance(inputs, str)
    items = [as_input(item, model.family.modality) for item in ([inputs] if single else inputs)]
    if not items:
        return []
    examples, how = Examples(items, None, "test"), Encoding(None, device, batch=batch_size)
    features: dict[tuple[str | None, int | None], Features] = {}
    rows: list[dict[str, Prediction]] = [{} for _ in items]
    for task, classifier in heads.items():
        head: Head = head_of(classifier)
        reading = (head.pooling, head.max_length)
        if reading not in features:
            features[reading] = encode(model, examples, task=task, head=head, how=how)
        logits = logits_of(classifier, features[reading].values)
        for row, prediction in zip(rows, head_kind(head.kind).decode(logits, head.labels), strict=True):
            row[task] = prediction
    return rows[0] if single else rows


def extract(
    encoder: torch.nn.Module,
    family: Family,
    pooling: str,
    examples: Examples,
    processor: Processor,
    *,
    task: str,
    how: Encoding,
) -> Features:
    """Encode all examples without the cache, in eval mode (training modes are restored); float32 on the CPU."""
    if pooling not in family.poolings:
        raise RecipeError(f"family {family.name!r} has no pooling {pooling!r}; {nearest(pooling, family.poolings)}")
    if not len(examples):
        raise RecipeError(f"the {examples.split} split of {task!r} is empty; give a split that has inputs")
    device, order = device_of(how.device), _order(examples, processor)
    values = torch.empty(0, 0)
    autocast = torch.autocast(device.type, getattr(torch, how.precision), enabled=how.precision != "float32")
    with autocast, _evaluating(encoder, device):  # one context for the whole pass: weights are cast once
        processed = batches(examples, processor, how.batch, order=order)
        for rows, inputs in zip(torch.split(torch.tensor(order), how.batch), processed, strict=True):
            if "input_ids" in inputs and "attention_mask" not in inputs:
                raise RecipeError(
                    f"a batch of {task!r} has 'input_ids' without 'attention_mask', so padding would count as text; "
                    "let the tokenizer return the mask"
                )
            shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in inputs.items())
            with torch.no_grad(), enough_memory(f"inputs of {task!r} ({shapes})", "give a smaller batch"):
                features = family.features(
                    encoder, {name: tensor.to(device) for name, tensor in inputs.items()}, pooling
                )
            width = values.shape[1] or "d"
            if features.ndim != 2 or len(features) != len(rows) or width not in ("d", features.shape[1]):
                raise IncompatibleError(
                    f"the encoder must return features of shape ({len(rows)}, {width}) for {len(rows)} inputs of "
                    f"{task!r}, got {tuple(features.shape)}; choose another pooling, or correct the encoder"
                )
            if width == "d":
                values = torch.empty(len(examples), features.shape[1])
            values.index_copy_(0, rows, features.to("cpu", torch.float32))
    finite = values.isfinite().all(1)
    if not finite.all():
        advice = "check its weights" if how.precision == "float32" else "use precision float32"
        raise NumericalError(
            f"the encoder gives NaN or infinity for row {int((~finite).nonzero()[0])} of {task!r} in {how.precision}; "
            f"{advice}"
        )
    return Features.of(values, examples, task)


def _order(examples: Examples, processor: Processor) -> list[int]:
    """Row numbers, longest texts first so that memory runs out in the first batch or never; images in order."""
    if processor.modality != "text":
        return list(range(len(examples)))
    return sorted(range(len(examples)), key=lambda row: -len(examples.inputs[row]))


@contextmanager
def _evaluating(encoder: torch.nn.Module, device: torch.device) -> Iterator[None]:
    modes = [(module, module.training) for module in encoder.modules()]
    encoder.to(device).eval()
    try:
        yield
    finally:
        torch.clear_autocast_cache()  # its casts have no gradient, and the caller may train under autocast
        for module, training in modes:
            module.training = training
