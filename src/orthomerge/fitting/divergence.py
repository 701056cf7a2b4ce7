"""The experts' outputs as targets: KL(softmax(z_t) || softmax(head_t(features))), summed over tasks.

It is measured where predictions are made, so that what the heads do not read is free to move. All heads are applied at
once: those with fewer classes get rows of zeros whose bias keeps them out of the softmax.

Letters: W [T, C, d], b [T, C] with C the most classes of any task; z the experts' logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import log_softmax, normalize, pad

from orthomerge.heads import Classifier, Head

if TYPE_CHECKING:
    from orthomerge.fitting.inputs import Inputs

__all__ = ["Divergence", "on_device"]

_OUT = -1e4  # the bias of a class that there is not


class Divergence:
    """`heads`: those that student features are read by; `teachers`: the experts' own, which make the targets.

    `held`: where held-out rows are looked up, if not in `inputs`. `lr`: the heads are trained along with the encoder,
    by Adam; 0 leaves them as they are.
    """

    def __init__(
        self,
        heads: Mapping[str, Head],
        teachers: Mapping[str, Head],
        inputs: Inputs,
        *,
        held: Inputs | None = None,
        lr: float = 0.0,
        temperature: float = 1.0,
    ) -> None:
        self._tasks, self.lr, self._temperature = list(heads), lr, temperature
        self._device = inputs.device
        self._width = max(len(head.labels) for head in heads.values())
        self._held = inputs if held is None else held
        self._teachers = {task: on_device(head, self._device) for task, head in teachers.items()}
        self._targets = torch.zeros(len(inputs.teacher), self._width, device=self._device)
        for task, head in self._teachers.items():
            rows = inputs.rows[task].to(self._device)
            logits = head(inputs.teacher[rows]) / temperature
            self._targets[rows, : logits.shape[1]] = log_softmax(logits, 1)
            self._targets[rows, logits.shape[1] :] = _OUT
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

    def loss(self, features: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        target = self._targets[rows.to(features.device, non_blocking=True)]
        return self._divergence(target, self._logits(features)).mean(1).sum()

    def penalty(self) -> torch.Tensor | None:
        return None

    def judge(self, features: torch.Tensor, rows: torch.Tensor, task: str) -> torch.Tensor:
        return self.against(features, self._held.teacher[rows.to(features.device)], task)

    def against(self, features: torch.Tensor, teacher: torch.Tensor, task: str) -> torch.Tensor:
        """The divergence [n] of features from what the expert makes of its own, `teacher` [n, d]."""
        target = log_softmax(self._teachers[task](teacher) / self._temperature, 1)
        return self._divergence(target, self._head(self._tasks.index(task))(features))

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

    def _divergence(self, target: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return (target.exp() * (target - log_softmax(logits / self._temperature, -1))).sum(-1)


def on_device(head: Head, device: torch.device) -> Head:
    """The same head in float32 on a device."""
    return head.with_tensors({name: tensor.to(device, torch.float32) for name, tensor in head.tensors().items()})
