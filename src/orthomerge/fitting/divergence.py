"""The experts' outputs as targets: KL(softmax(z_t) || softmax(head_t(features))), summed over tasks.

It is measured where predictions are made, so that what the heads do not read is free to move. All heads are applied at
once: those with fewer classes get rows of zeros whose bias keeps them out of the softmax.

Letters: W [T, C, d], b [T, C] with C the most classes of any task; z the experts' logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import normalize, pad

from orthomerge.models.heads import Classifier, Head
from orthomerge.models.kinds import head_kind

if TYPE_CHECKING:
    from orthomerge.fitting.inputs import Inputs, Targets


_OUT = -1e4  # the bias of a class that there is not


class Divergence:
    """`heads`: those that student features are read by; `teachers`: the experts' own, which make the targets.

    `lr`: the heads are trained along with the encoder, by Adam; 0 leaves them as they are.
    """

    def __init__(
        self,
        heads: Mapping[str, Head],
        teachers: Mapping[str, Head],
        inputs: Inputs,
        *,
        lr: float = 0.0,
        temperature: float = 1.0,
    ) -> None:
        self.inputs, self.lr, self._temperature = inputs, lr, temperature
        self._tasks, self._device = list(inputs.targets), inputs.device
        self._width = max(len(head.labels) for head in heads.values())
        self._teachers = {task: on_device(teachers[task], self._device) for task in self._tasks}
        self._kinds = {task: head_kind(head.kind) for task, head in self._teachers.items()}
        softened = [self._softened(targets.features, task) for task, targets in inputs.targets.items()]
        self._targets = torch.cat([pad(part, (0, self._width - part.shape[1]), value=_OUT) for part in softened])
        self._weights = torch.cat([targets.weights for targets in inputs.targets.values()])
        self.use(heads)

    def use(self, heads: Mapping[str, Head]) -> None:
        """Other heads to read student features by."""
        self._given = {task: heads[task] for task in self._tasks}
        self._heads = {task: on_device(head, self._device) for task, head in self._given.items()}
        self._batched = all(head.hidden is None for head in self._heads.values())
        self._unit = torch.tensor([head.normalise for head in self._heads.values()], device=self._device)
        tensors = [{name: t.clone() for name, t in head.tensors().items()} for head in self._heads.values()]
        if self.lr:
            for named in tensors:
                for tensor in named.values():
                    tensor.requires_grad_(True)
        self._tensors = tensors
        self.parameters = [tensor for named in tensors for tensor in named.values()] if self.lr else []
        self._fixed = self._stack() if self._batched and not self.lr else None

    def loss(self, features: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        there = numbers.to(features.device, non_blocking=True)
        terms = self._divergence(self._targets[there], self._logits(features))
        return (self._weights[there] * terms).mean(1).sum()

    def penalty(self) -> torch.Tensor | None:
        return None

    def judge(self, features: torch.Tensor, targets: Targets, task: str) -> torch.Tensor:
        logits = self._head(self._tasks.index(task))(features) / self._temperature
        return self._kinds[task].divergence_to(logits, self._softened(targets.features, task))

    def classifiers(self) -> dict[str, Classifier]:
        found: dict[str, Classifier] = dict(self._given)
        if self.lr:
            for named, (task, head) in zip(self._tensors, self._given.items(), strict=True):
                given = head.tensors()
                found[task] = head.with_tensors({name: t.detach().to(given[name]) for name, t in named.items()})
        return found

    def measures(self) -> dict[str, float]:
        return {}

    def _head(self, number: int) -> Head:
        head = self._heads[self._tasks[number]]
        return head.with_tensors(self._tensors[number]) if self.lr else head

    def _logits(self, features: torch.Tensor) -> torch.Tensor:
        """Of features [T, B, d], padded to [T, B, C]."""
        if not self._batched:
            parts = [self._head(number)(features[number]) for number in range(len(self._tasks))]
            return torch.stack([pad(part, (0, self._width - part.shape[1]), value=_OUT) for part in parts])
        weight, bias = self._fixed or self._stack()
        read = torch.where(self._unit[:, None, None], normalize(features, dim=-1), features)
        return torch.baddbmm(bias[:, None], read, weight.mT)

    def _stack(self) -> tuple[torch.Tensor, torch.Tensor]:
        weights, biases = [], []
        for number in range(len(self._tasks)):
            output = self._head(number).output
            missing = self._width - len(output.weight)
            bias = output.weight.new_zeros(len(output.weight)) if output.bias is None else output.bias
            weights.append(pad(output.weight.float(), (0, 0, 0, missing)))
            biases.append(pad(bias.float(), (0, missing), value=_OUT))
        return torch.stack(weights), torch.stack(biases)

    def _softened(self, features: torch.Tensor, task: str) -> torch.Tensor:
        """What is kept of an expert's outputs, [n, C], from its own features."""
        return self._kinds[task].soft_targets(self._teachers[task](features) / self._temperature)

    def _divergence(self, targets: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Of each target of a batch, [T, B], all tasks at once where their heads are of one kind."""
        logits, kinds = logits / self._temperature, list(self._kinds.values())
        if len(set(kinds)) == 1:
            return kinds[0].divergence_to(logits, targets)
        return torch.stack([kind.divergence_to(*pair) for kind, *pair in zip(kinds, logits, targets, strict=True)])


def on_device(head: Head, device: torch.device) -> Head:
    """The same head in float32 on a device."""
    return head.with_tensors({name: tensor.to(device, torch.float32) for name, tensor in head.tensors().items()})
