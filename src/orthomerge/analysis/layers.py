"""What every layer of an encoder makes of inputs, read off as its pooling reads the last layer.

Hidden states come from `output_hidden_states` of transformers: the embeddings, then every layer. `pooler` and
`projection` sit behind the last layer; before it the first token stands for them. T5 as a classifier is read in its
decoder. An encoder that gives no hidden states has its features only.

Letters: states [B, tokens, d]; what comes back is [n, d] for every layer, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from orthomerge.features.extract import extract
from orthomerge.models.pooling import cls

if TYPE_CHECKING:
    from orthomerge.data.processing import Processor
    from orthomerge.data.task import Examples
    from orthomerge.features.extract import Precision
    from orthomerge.merged import Merged

__all__ = ["FEATURES", "layer_states"]

FEATURES = "features"  # what the head reads
_BEHIND = ("pooler", "projection")
_NAME = "every layer"


def layer_states(
    merged: Merged,
    examples: Examples,
    processor: Processor,
    *,
    task: str,
    batch: int = 64,
    device: str = "auto",
    autocast: Precision = "float32",
) -> dict[str, torch.Tensor]:
    """By name: `embeddings`, what `layer 0` and each after it makes of them, and `features`: what the head reads."""
    family, pooling = merged.family, merged.pooling
    reader = _Reader(family.poolings[pooling], cls if pooling in _BEHIND else family.poolings[pooling])
    given = replace(family, poolings={_NAME: reader})
    found = extract(
        merged.encoder,
        given,
        _NAME,
        examples,
        processor,
        task=task,
        batch=batch,
        device=device,
        autocast=autocast,
    )
    parts = torch.split(found.values, reader.widths, dim=1)
    names = ["embeddings", *(f"layer {number}" for number in range(len(parts) - 2))][: len(parts) - 1]
    return dict(zip([*names, FEATURES], parts, strict=True))


@dataclass(frozen=True)
class _Reader:
    """As a pooling: all layers' states side by side, [B, sum of widths]. `inner` reads the states of one layer."""

    outer: Callable[..., torch.Tensor]
    inner: Callable[..., torch.Tensor]
    widths: list[int] = field(default_factory=list)

    def __call__(self, encoder: Callable[..., Any], batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        listening = _Listening(encoder)
        features = self.outer(listening, batch)
        config = getattr(encoder, "config", None)
        parts = [self.inner(_Said(state, config), batch).float() for state in listening.states]
        parts.append(features.float())
        self.widths[:] = [part.shape[1] for part in parts]
        return torch.cat(parts, 1)


@dataclass
class _Listening:
    """An encoder whose hidden states are kept."""

    encoder: Callable[..., Any]
    states: tuple[torch.Tensor, ...] = ()

    @property
    def config(self) -> Any:
        return getattr(self.encoder, "config", None)

    def __call__(self, **batch: Any) -> Any:
        if self.config is None:  # a module of somebody's own
            return self.encoder(**batch)
        output = self.encoder(**batch, output_hidden_states=True)
        states = getattr(output, "decoder_hidden_states", None) or getattr(output, "hidden_states", None)
        self.states = tuple(states or ())
        return output


@dataclass(frozen=True)
class _Said:
    """Stands for an encoder whose last hidden state is known."""

    last_hidden_state: torch.Tensor
    config: Any

    def __call__(self, **batch: Any) -> _Said:
        return self
