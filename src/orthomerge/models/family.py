"""What orthomerge must know of a model family: where the encoder ends and its head begins.

Each family is one small file that fills a `Family`. Names of tensors are those on disk, as stock transformers writes
them; *canonical* names are the encoder's own (`encoder.layer.0...`, without the `bert.` under which a classifier
keeps it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from orthomerge.heads import Activation

if TYPE_CHECKING:
    import torch

    from orthomerge.checkpoints.checkpoint import Checkpoint

__all__ = ["Family", "Features", "HeadLayout"]

# Runs an encoder (a module, or a function of its parameters) on a batch and gives the features [B, d] that its head
# reads.
Features = Callable[[Callable[..., Any], Mapping[str, "torch.Tensor"]], "torch.Tensor"]


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
    what the stock classifier does. `optional`: patterns of encoder tensors that experts may lack (an unused pooler);
    they are copied from the base. `foreign`: patterns of tensors outside the encoder that are left out (pre-training
    heads). `tied`: name -> name of the tensor that it repeats. `architecture`: the stock class that holds encoder and
    head, None where there is none. `adapt`: brings names of older or other writers to today's.
    """

    name: str
    title: str
    model_types: tuple[str, ...]
    modality: Literal["text", "image", "other"]
    encoder_class: str
    prefix: str
    head: HeadLayout | None
    poolings: Mapping[str, Features]
    architecture: str | None = None
    encoder_options: Mapping[str, Any] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    adapt: Callable[[Checkpoint], Checkpoint] | None = None

    @property
    def default_pooling(self) -> str:
        return next(iter(self.poolings))

    def may_lack(self, name: str, pooling: str) -> bool:
        """Whether an expert may lack an encoder tensor: it is optional, and the features are not read through it."""
        through_pooler = pooling == "pooler" and fnmatchcase(name, "pooler.*")
        return not through_pooler and any(fnmatchcase(name, pattern) for pattern in self.optional)
