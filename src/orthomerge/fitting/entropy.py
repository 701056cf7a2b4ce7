"""The entropy of the predictions, summed over tasks: small where the model is sure of itself, rightly or wrongly.

Yang et al. 2024 (AdaMerging), arXiv 2310.02575; heads are the experts' own and stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import log_softmax

from orthomerge.fitting.divergence import on_device
from orthomerge.models.heads import Classifier, Head

if TYPE_CHECKING:
    from orthomerge.fitting.inputs import Inputs, Targets


class Entropy:
    """There is nothing to train but the encoder."""

    lr = 0.0

    def __init__(self, heads: Mapping[str, Head], inputs: Inputs) -> None:
        self.inputs, self._given = inputs, dict(heads)
        self._weights = torch.cat([inputs.targets[task].weights for task in heads])
        self._heads = {task: on_device(head, inputs.device) for task, head in heads.items()}
        self.parameters: list[torch.Tensor] = []

    def loss(self, features: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        weights = self._weights[numbers.to(features.device, non_blocking=True)]
        parts = [
            (own * _entropy(head(read))).mean()
            for own, head, read in zip(weights, self._heads.values(), features, strict=True)
        ]
        return torch.stack(parts).sum()

    def penalty(self) -> torch.Tensor | None:
        return None

    def judge(self, features: torch.Tensor, targets: Targets, task: str) -> torch.Tensor:
        return _entropy(self._heads[task](features))

    def classifiers(self) -> Mapping[str, Classifier]:
        return self._given

    def measures(self) -> dict[str, float]:
        return {}


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    """In nats, [n]."""
    logs = log_softmax(logits, -1)
    return -(logs.exp() * logs).sum(-1)
