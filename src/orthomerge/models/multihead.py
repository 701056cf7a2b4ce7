"""A model as one module: batch in, the logits of every task out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from orthomerge.core.errors import RecipeError
from orthomerge.models.extras import rebuilt
from orthomerge.models.heads import Head, head_of

if TYPE_CHECKING:
    from orthomerge.models.family import Family
    from orthomerge.models.heads import Extra


class ClassifierModule(nn.Module):
    """A classifier whose tensors move with the module that it is in."""

    def __init__(self, classifier: Head | Extra) -> None:
        super().__init__()
        self._head, self._kind = head_of(classifier), None if isinstance(classifier, Head) else classifier.kind
        extra = {} if isinstance(classifier, Head) else classifier.extra_tensors()
        self._extra = {name: f"extra_{_plain(name)}" for name in extra}
        for name, tensor in self._head.tensors().items():
            self.register_parameter(_plain(name), nn.Parameter(tensor.detach().clone()))
        for name, tensor in extra.items():
            self.register_buffer(self._extra[name], tensor.detach().clone())

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        head = self._head.with_tensors({name: self.get_parameter(_plain(name)) for name in self._head.tensors()})
        if self._kind is None:
            return head(features)
        extra = {name: self.get_buffer(buffer) for name, buffer in self._extra.items()}
        return rebuilt(self._kind, head, extra, where=Path(self._kind))(features)


class MultiHead(nn.Module):
    """One encoder and a classifier per task; the encoder is run once per batch."""

    def __init__(self, encoder: nn.Module, family: Family, heads: Mapping[str, Head | Extra]) -> None:
        super().__init__()
        self.encoder = encoder
        self.heads = nn.ModuleDict({_plain(task): ClassifierModule(head) for task, head in heads.items()})
        self._family = family
        self._poolings = {task: head_of(head).pooling or family.default_pooling for task, head in heads.items()}

    def forward(self, **batch: Any) -> dict[str, torch.Tensor]:
        """Logits [B, C] by task."""
        if not self._poolings:
            raise RecipeError("this model has no heads; give it some with `with_heads`")
        output, config = self._family.forward(self.encoder, batch), getattr(self.encoder, "config", None)
        features = {
            pooling: self._family.poolings[pooling](output, batch, config) for pooling in {*self._poolings.values()}
        }
        return {task: self.heads[_plain(task)](features[pooling]) for task, pooling in self._poolings.items()}


def _plain(name: str) -> str:
    """A name that a module may have for a part."""
    return name.replace(".", "__")
