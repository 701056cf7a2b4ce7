"""What every layer of an encoder makes of inputs, read off as its pooling reads the last layer.

Hidden states come from `output_hidden_states` of transformers: the embeddings, then every layer. `pooler` and
`projection` sit behind the last layer; before it the first token stands for them. T5 as a classifier is read in its
decoder. An encoder that gives no hidden states has its features only.

Letters: states [B, tokens, d]; what comes back is [n, d] for every layer, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from orthomerge.models.extract import extract
from orthomerge.models.family import cls

if TYPE_CHECKING:
    from orthomerge.data.task import Examples
    from orthomerge.models.extract import Precision
    from orthomerge.models.family import Encoder, Family, Forward, Pooling
    from orthomerge.models.processing import Processor


FEATURES = "features"  # what the head reads
_BEHIND = ("pooler", "projection")
_NAME = "every layer"


def layer_states(
    encoder: Encoder,
    family: Family,
    pooling: str,
    examples: Examples,
    processor: Processor,
    *,
    task: str,
    batch: int = 64,
    device: str = "auto",
    autocast: Precision = "float32",
) -> dict[str, torch.Tensor]:
    """By name: `embeddings`, what `layer 0` and each after it makes of them, and `features`: what the head reads."""
    reader = _Reader(family.poolings[pooling], cls if pooling in _BEHIND else family.poolings[pooling])
    layered = replace(family, forward=partial(_with_states, family.forward), poolings={_NAME: reader})
    features = extract(
        encoder,
        layered,
        _NAME,
        examples,
        processor,
        task=task,
        batch=batch,
        device=device,
        autocast=autocast,
    )
    parts = torch.split(features.values, reader.widths, dim=1)
    names = ["embeddings", *(f"layer {number}" for number in range(len(parts) - 2))][: len(parts) - 1]
    return dict(zip([*names, FEATURES], parts, strict=True))


@dataclass(frozen=True)
class _Reader:
    """As a pooling: all layers' states side by side, [B, sum of widths]. `inner` reads the states of one layer."""

    outer: Pooling
    inner: Pooling
    widths: list[int] = field(default_factory=list)

    def __call__(self, output: Any, batch: Mapping[str, torch.Tensor], config: Any) -> torch.Tensor:
        states = getattr(output, "decoder_hidden_states", None) or getattr(output, "hidden_states", None) or ()
        parts = [self.inner(SimpleNamespace(last_hidden_state=state), batch, config).float() for state in states]
        parts.append(self.outer(output, batch, config).float())
        self.widths[:] = [part.shape[1] for part in parts]
        return torch.cat(parts, 1)


def _with_states(forward: Forward, encoder: Encoder, batch: Mapping[str, Any]) -> Any:
    """The output of an encoder with the hidden states of all layers; of somebody's own module, its output alone."""
    asked: dict[str, Any] = {} if getattr(encoder, "config", None) is None else {"output_hidden_states": True}
    return forward(encoder, {**batch, **asked})
