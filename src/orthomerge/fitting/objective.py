"""Objectives of fits: functions of the features of a batch over all tasks."""

from collections.abc import Mapping

import torch
from torch.nn.functional import log_softmax

from orthomerge.fitting.setting import Targets
from orthomerge.models.heads import Classifier, Head, head_kind


class Objective:
    """Sum over tasks of the weighted mean of `terms`. `parameters`: its own, trained at rate `lr`."""

    def __init__(self, heads: Mapping[str, Head], *, lr: float = 0.0) -> None:
        self._heads, self.lr = dict(heads), lr
        self.parameters: list[torch.Tensor] = []

    def terms(self, features: torch.Tensor, targets: Targets, task: str) -> torch.Tensor:
        """Unweighted loss of each target of one task, [n], from features [n, d]."""
        raise NotImplementedError

    def loss(self, features: Mapping[str, torch.Tensor], targets: Mapping[str, Targets]) -> torch.Tensor:
        return torch.stack(
            [(some.weights * self.terms(features[task], some, task)).mean() for task, some in targets.items()]
        ).sum()

    def penalty(self) -> torch.Tensor | None:
        """Loss term of the objective's parameters, which is not part of a held-out loss."""
        return None

    def classifiers(self) -> Mapping[str, Classifier]:
        return self._heads

    def measures(self) -> dict[str, float]:
        return {}


class Entropy(Objective):
    """Entropy of the predictions in nats (Yang et al. 2024, AdaMerging, arXiv 2310.02575), under fixed heads."""

    def __init__(self, heads: Mapping[str, Head], device: torch.device) -> None:
        super().__init__(heads)
        self._on_device = {task: on_device(head, device) for task, head in heads.items()}

    def terms(self, features: torch.Tensor, targets: Targets, task: str) -> torch.Tensor:
        logs = log_softmax(self._on_device[task](features), -1)
        return -(logs.exp() * logs).sum(-1)


class Divergence(Objective):
    """Distillation: KL(softmax(z_t) || softmax(head_t(features))), z_t the expert's logits; `lr`: of `heads`, or 0."""

    def __init__(
        self, heads: Mapping[str, Head], teachers: Mapping[str, Head], device: torch.device, *, lr: float = 0.0
    ) -> None:
        super().__init__(heads, lr=lr)
        self._teachers = {task: on_device(head, device) for task, head in teachers.items()}
        self._students = {task: on_device(head, device) for task, head in heads.items()}
        if lr:
            for task, head in self._students.items():
                trained = {name: tensor.clone().requires_grad_() for name, tensor in head.tensors().items()}
                self._students[task] = head.with_tensors(trained)
                self.parameters += trained.values()

    def terms(self, features: torch.Tensor, targets: Targets, task: str) -> torch.Tensor:
        teacher = self._teachers[task]
        return head_kind(teacher.kind).divergence(self._students[task](features), teacher(targets.features))

    def classifiers(self) -> dict[str, Head]:
        if not self.lr:
            return self._heads
        trained = {}
        for task, head in self._heads.items():
            named, like = self._students[task].tensors(), head.tensors()
            trained[task] = head.with_tensors({name: tensor.detach().to(like[name]) for name, tensor in named.items()})
        return trained


def on_device(head: Head, device: torch.device) -> Head:
    return head.to(device, torch.float32)
