"""What is trained: an encoder, and one head per task on top of its features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from orthomerge.core.errors import CheckpointError, IncompatibleError, RecipeError, nearest
from orthomerge.files.opening import open_checkpoint
from orthomerge.models.families import family as find_family
from orthomerge.models.families import family_for
from orthomerge.models.heads import Head, Linear
from orthomerge.models.networks import LinearisedEncoder
from orthomerge.models.problems import base_problems, check_problems
from orthomerge.models.skeleton import Skeleton, encoder_config
from orthomerge.models.split import split_base
from orthomerge.models.tensors import FileTensors

if TYPE_CHECKING:
    from pathlib import Path

    from orthomerge.models.family import Family, HeadLayout


_SPREAD = 0.02  # of a fresh head's weights, as in transformers; biases are zero


class OrdinaryEncoder(nn.Module):
    """The encoder as it is; `tuned` gives it back, as for one that is linearised."""

    def __init__(self, family: Family, pooling: str, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self._family, self._pooling = family, pooling

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._family.features(self.encoder, batch, self._pooling)

    def tuned(self) -> nn.Module:
        return self.encoder


class TrainableHead(nn.Module):
    """A `Head` as a module: one linear layer or two."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self._like = head
        self.layers = nn.ModuleList(_layer(linear) for linear in (head.hidden, head.output) if linear is not None)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self._like.normalise:
            features = nn.functional.normalize(features, dim=-1)
        *hidden, output = self.layers
        for layer in hidden:
            features = getattr(nn.functional, self._like.activation or "")(layer(features))
        logits: torch.Tensor = output(features)
        return logits

    def head(self, labels: tuple[str, ...]) -> Head:
        """What was trained, as a `Head` on the CPU."""
        *hidden, output = [_linear(layer) for layer in self.layers]
        return Head(output, labels, hidden[0] if hidden else None, self._like.activation, self._like.normalise)


class Model(nn.Module):
    """One encoding, and the heads of its tasks in order."""

    def __init__(self, encoding: OrdinaryEncoder | LinearisedEncoder, heads: list[TrainableHead]) -> None:
        super().__init__()
        self.encoding = encoding
        self.heads = nn.ModuleList(heads)

    def forward(self, batch: Mapping[str, torch.Tensor], number: int = 0) -> torch.Tensor:
        """Logits of task `number`, [B, C]."""
        logits: torch.Tensor = self.heads[number](self.encoding(batch))
        return logits

    def head(self, number: int) -> TrainableHead:
        """The head of task `number`."""
        return cast("TrainableHead", self.heads[number])


def choose_family(base: Path, name: str | None, *, head: Head | None) -> Family:
    """The family to train: as named, or by the base's config. A CLIP without a ready head gets a linear one."""
    checkpoint = open_checkpoint(base)
    kind = (checkpoint.config or {}).get("model_type")
    if kind is None:
        raise CheckpointError(f"{base} must have a config.json that says its 'model_type'; give the base as a folder")
    family = find_family(name) if name is not None else family_for(str(kind), checkpoint)
    if kind not in family.model_types:
        raise RecipeError(f"{base} is of model type {kind!r}, family {family.name!r} reads {family.model_types[0]!r}")
    return find_family("clip_classifier") if name is None and family.name == "clip" and head is None else family


def load_base(base: Path, family: Family, pooling: str) -> Skeleton:
    """The encoder of a base in float32; heads of any kind that the base has are left behind."""
    if pooling not in family.poolings:
        raise RecipeError(f"unknown pooling {pooling!r} for {family.name}; {nearest(pooling, family.poolings)}")
    checkpoint = open_checkpoint(base)
    checkpoint = family.adapted(checkpoint)
    split = split_base({key: checkpoint.spec(key) for key in (*checkpoint, *checkpoint.aliases)}, family)
    check_problems(base_problems(checkpoint, split))
    tensors = FileTensors({key: (checkpoint, name) for key, name in split.names.items()})
    specs = {key: spec.cast("F32") for key, spec in tensors.specs.items()}
    skeleton = Skeleton.build(family, encoder_config(checkpoint.config or {}, family), specs)
    skeleton.fill(tensors)
    return skeleton


def start_head(
    head: Head | None, layout: HeadLayout | None, labels: tuple[str, ...], *, width: int, generator: torch.Generator
) -> TrainableHead:
    """The head that training starts from: the one given, brought to the task's order of labels, or a fresh one."""
    if head is None:
        if layout is None:
            raise RecipeError("this family has no head of its own: give one as `head` (CLIP: zero_shot_head)")
        *hidden, output = [
            Linear(torch.empty(size, width).normal_(0, _SPREAD, generator=generator), torch.zeros(size))
            for size in [width] * (len(layout.layers) - 1) + [len(labels)]
        ]
        fresh = Head(output, labels, hidden[0] if hidden else None, layout.activation)
        return TrainableHead(fresh)
    if head.width != width:
        raise IncompatibleError(f"the head reads {head.width} features, the encoder gives {width}; check the pooling")
    if layout is not None and not layout.fits(head):
        raise IncompatibleError(
            f"the head is built otherwise than the family's own ({', '.join(layout.layers)}), "
            "so no checkpoint could hold it; give one of the same layers, or none"
        )
    return TrainableHead(head.reordered(labels))


def _layer(linear: Linear) -> nn.Linear:
    size, width = linear.weight.shape
    layer = nn.Linear(width, size, bias=linear.bias is not None)
    with torch.no_grad():
        layer.weight.copy_(linear.weight)
        if linear.bias is not None:
            layer.bias.copy_(linear.bias)
    return layer


def _linear(layer: nn.Module) -> Linear:
    weight, bias = layer.get_parameter("weight"), getattr(layer, "bias", None)
    return Linear(weight.detach().cpu().clone(), None if bias is None else bias.detach().cpu().clone())
