"""What orthomerge must know of a model family: where the encoder ends and its head begins.

`families` is the table. Names of tensors are those on disk, as stock transformers writes them; *canonical* names are
the encoder's own (`encoder.layer.0...`, without the `bert.` under which a classifier keeps it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from orthomerge.models.heads import Activation

if TYPE_CHECKING:
    import torch

    from orthomerge.files.checkpoint import Checkpoint


Encoder = Callable[..., Any]  # a module, or a function of its parameters
# Runs an encoder on a batch and gives its output.
Forward = Callable[[Encoder, Mapping[str, "torch.Tensor"]], Any]
# Reads the features [B, d] of a head off an output; gets the batch and the encoder's config, if it has one, too.
Pooling = Callable[[Any, Mapping[str, "torch.Tensor"], Any], "torch.Tensor"]


def _plain(encoder: Encoder, batch: Mapping[str, torch.Tensor]) -> Any:
    return encoder(**batch)


@dataclass(frozen=True)
class HeadLayout:
    """Names of a head's layers in a classifier's checkpoint, first to last (at most two), and what is between."""

    layers: tuple[str, ...]
    activation: Activation | None = None
    normalise: bool = False

    def names(self) -> tuple[str, ...]:
        return tuple(f"{layer}.{part}" for layer in self.layers for part in ("weight", "bias"))


@dataclass(frozen=True)
class Family:
    """One model family.

    `prefix`: where a classifier keeps the encoder (`"bert."`). `poolings`: how features are read, the first being
    what the stock classifier does; `forward`: how the encoder is run for all of them. `optional`: patterns of encoder
    tensors that experts may lack (an unused pooler); they are copied from the base. `foreign`: patterns of tensors
    outside the encoder that are left out (pre-training heads). `tied`: name -> name of the tensor that it repeats.
    `architecture`: the stock class that holds encoder and head, None where there is none. `adapt`: brings names of
    older or other writers to today's.
    """

    name: str
    title: str
    model_types: tuple[str, ...]
    modality: Literal["text", "image", "other"]
    encoder_class: str
    prefix: str
    head: HeadLayout | None
    poolings: Mapping[str, Pooling]
    forward: Forward = _plain
    architecture: str | None = None
    encoder_options: Mapping[str, Any] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    adapt: Callable[[Checkpoint], Checkpoint] | None = None

    @property
    def default_pooling(self) -> str:
        return next(iter(self.poolings))

    def features(self, encoder: Encoder, batch: Mapping[str, torch.Tensor], pooling: str) -> torch.Tensor:
        """What a head reads, [B, d]: the encoder is run once, and its output is pooled."""
        output = self.forward(encoder, batch)
        return self.poolings[pooling](output, batch, getattr(encoder, "config", None))

    def may_lack(self, name: str, pooling: str) -> bool:
        """Whether an expert may lack an encoder tensor: it is optional, and the features are not read through it."""
        through_pooler = pooling == "pooler" and fnmatchcase(name, "pooler.*")
        return not through_pooler and any(fnmatchcase(name, pattern) for pattern in self.optional)
