"""A model as one module: batch in, the logits of every task out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from orthomerge.core.errors import RecipeError
from orthomerge.models.heads import Head

if TYPE_CHECKING:
    from orthomerge.models.family import Family
    from orthomerge.models.heads import Extra


class ClassifierModule(nn.Module):
    """A classifier whose tensors move with the module that it is in."""

    def __init__(self, classifier: Head | Extra) -> None:
        super().__init__()
        head = classifier if isinstance(classifier, Head) else classifier.head
        self._head, self._kind = head, None if isinstance(classifier, Head) else classifier.kind
        for name, tensor in head.tensors().items():
            self.register_parameter(_plain(name), nn.Parameter(tensor.detach().clone()))
        self._extra = () if isinstance(classifier, Head) else tuple(classifier.extra_tensors())
        for name in self._extra:
            self.register_buffer(f"extra_{_plain(name)}", classifier.extra_tensors()[name].detach().clone())  # type: ignore[union-attr]

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        head = self._head.with_tensors({name: self.get_parameter(_plain(name)) for name in self._head.tensors()})
        if self._kind is None:
            return head(features)
        from orthomerge.models.extras import rebuilt

        extra = {name: self.get_buffer(f"extra_{_plain(name)}") for name in self._extra}
        return rebuilt(self._kind, head, extra, where=Path(self._kind))(features)


class MultiHead(nn.Module):
    """One encoder and a classifier per task; the encoder is run once per batch."""

    def __init__(self, encoder: nn.Module, family: Family, heads: Mapping[str, Head | Extra]) -> None:
        super().__init__()
        self.encoder = encoder
        self.heads = nn.ModuleDict({_plain(task): ClassifierModule(head) for task, head in heads.items()})
        self._family = family
        named = {task: head if isinstance(head, Head) else head.head for task, head in heads.items()}
        self._poolings = {task: head.pooling or family.default_pooling for task, head in named.items()}

    def forward(self, **batch: Any) -> dict[str, torch.Tensor]:
        """Logits [B, C] by task."""
        if not self._poolings:
            raise RecipeError("this model has no heads; give it some with `with_heads`")
        output, config = self._family.forward(self.encoder, batch), getattr(self.encoder, "config", None)
        features = {
            pooling: self._family.poolings[pooling](output, batch, config)
            for pooling in dict.fromkeys(self._poolings.values())
        }
        return {task: self.heads[_plain(task)](features[pooling]) for task, pooling in self._poolings.items()}


def _plain(name: str) -> str:
    """A name that a module may have for a part."""
    return name.replace(".", "__")
