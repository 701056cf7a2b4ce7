"""One forward and backward pass over a batch of all tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from orthomerge.fitting.inputs import features_of

if TYPE_CHECKING:
    from orthomerge.fitting.kinds import Setting
    from orthomerge.fitting.objective import Objective


def backward(setting: Setting, objective: Objective, numbers: torch.Tensor) -> torch.Tensor:
    """The loss, without penalty, of the targets in `numbers` [T, B] (on the CPU) of the objective's inputs.

    Where inputs are targets of several tasks, each is encoded once. The gradient of loss and penalty is left in the
    encoder's and in the objective's parameters.
    """
    encoder, inputs = setting.encoder, objective.inputs
    rows, back = inputs.rows[numbers.view(-1)], None
    if inputs.shared:
        rows, back = torch.unique(rows, return_inverse=True)
    groups, order = inputs.grouped(rows)
    there = torch.stack([rows, order]).to(setting.device)
    encoder.gradient.zero_()
    for parameter in objective.parameters:
        parameter.grad = None
    with torch.autocast(encoder.device.type, dtype=torch.bfloat16, enabled=setting.half):
        features = features_of(encoder, inputs, there[0], groups, there[1])
    if back is not None:
        features = features[back.to(setting.device)]
    loss = objective.loss(features.float().view(*numbers.shape, -1), numbers)
    penalty = objective.penalty()
    (loss if penalty is None else loss + penalty).backward()  # type: ignore[no-untyped-call]
    return loss.detach()
