"""What a fit minimises: functions of the features that the encoder makes of a batch over all tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import log_softmax

from orthomerge.models.heads import Classifier, Head, head_kind

if TYPE_CHECKING:
    from orthomerge.fitting.inputs import Targets


class Objective:
    """The sum over tasks of the weighted mean of `terms`. `parameters`: trained along, by Adam with `lr`."""

    def __init__(self, heads: Mapping[str, Head], *, lr: float = 0.0) -> None:
        self._heads, self.lr = dict(heads), lr
        self.parameters: list[torch.Tensor] = []

    def terms(self, features: torch.Tensor, targets: Targets, task: str) -> torch.Tensor:
        """The loss of each target of one task, [n], from features [n, d], without weights."""
        raise NotImplementedError

    def loss(self, features: Mapping[str, torch.Tensor], targets: Mapping[str, Targets]) -> torch.Tensor:
        """The loss of some targets of each task."""
        means = [(some.weights * self.terms(features[task], some, task)).mean() for task, some in targets.items()]
        return torch.stack(means).sum()

    def penalty(self) -> torch.Tensor | None:
        """A loss of the parameters alone; not part of a held-out loss."""
        return None

    def classifiers(self) -> Mapping[str, Classifier]:
        """The heads, with whatever was trained in them."""
        return self._heads

    def measures(self) -> dict[str, float]:
        """What else to report at a look."""
        return {}


class Entropy(Objective):
    """The entropy of the predictions in nats: small where the model is sure of itself, rightly or wrongly.

    Yang et al. 2024 (AdaMerging), arXiv 2310.02575; heads are the experts' own and stay as they are.
    """

    def __init__(self, heads: Mapping[str, Head], device: torch.device) -> None:
        super().__init__(heads)
        self._readers = {task: on_device(head, device) for task, head in heads.items()}

    def terms(self, features: torch.Tensor, targets: Targets, task: str) -> torch.Tensor:
        logs = log_softmax(self._readers[task](features), -1)
        return -(logs.exp() * logs).sum(-1)


class Divergence(Objective):
    """The experts' outputs as targets: KL(softmax(z_t) || softmax(head_t(features))), z_t the expert's logits.

    It is measured where predictions are made, so that what the heads do not read is free to move. `heads` read student
    features; `teachers`, the experts' own, make the targets. `lr`: the heads are trained as well; 0 for not at all.
    """

    def __init__(
        self, heads: Mapping[str, Head], teachers: Mapping[str, Head], device: torch.device, *, lr: float = 0.0
    ) -> None:
        super().__init__(heads, lr=lr)
        self._teachers = {task: on_device(head, device) for task, head in teachers.items()}
        self._readers = {task: on_device(head, device) for task, head in heads.items()}
        if lr:
            for task, head in self._readers.items():
                trained = {name: tensor.clone().requires_grad_() for name, tensor in head.tensors().items()}
                self._readers[task] = head.with_tensors(trained)
                self.parameters += trained.values()

    def terms(self, features: torch.Tensor, targets: Targets, task: str) -> torch.Tensor:
        teacher = self._teachers[task]
        return head_kind(teacher.kind).divergence(self._readers[task](features), teacher(targets.features))

    def classifiers(self) -> dict[str, Head]:
        """In the dtypes of the heads that were given; heads that were not trained are those themselves."""
        if not self.lr:
            return self._heads
        trained = {}
        for task, head in self._heads.items():
            named, like = self._readers[task].tensors(), head.tensors()
            trained[task] = head.with_tensors({name: tensor.detach().to(like[name]) for name, tensor in named.items()})
        return trained


def on_device(head: Head, device: torch.device) -> Head:
    """The same head in float32 on a device."""
    return head.with_tensors({name: tensor.to(device, torch.float32) for name, tensor in head.tensors().items()})
