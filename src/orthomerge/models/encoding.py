"""Features of inputs under a model's encoder, by content: the same weights never see the same inputs twice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orthomerge.models.extract import Precision, device_of, extract
from orthomerge.models.feature_cache import FeatureCache, FeatureKey
from orthomerge.models.features import Features
from orthomerge.models.heads import head_of

if TYPE_CHECKING:
    import torch

    from orthomerge.data.task import Examples
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
