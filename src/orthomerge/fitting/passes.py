"""One forward and backward pass over a batch of all tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from orthomerge.fitting.inputs import features_of

if TYPE_CHECKING:
    from orthomerge.fitting.inputs import Inputs
    from orthomerge.fitting.kinds import Setting
    from orthomerge.fitting.objective import Objective

__all__ = ["backward"]


def backward(setting: Setting, objective: Objective, inputs: Inputs, rows: torch.Tensor) -> torch.Tensor:
    """The loss, without penalty, of the inputs in `rows` [T, B] (on the CPU).

    The gradient of loss and penalty is left in the encoder's and in the objective's parameters.
    """
    encoder = setting.encoder
    groups, order = inputs.grouped(rows.view(-1))
    there = torch.stack([rows.view(-1), order]).to(setting.device)
    encoder.gradient.zero_()
    for parameter in objective.parameters:
        parameter.grad = None
    with torch.autocast(encoder.device.type, dtype=torch.bfloat16, enabled=setting.half):
        features = features_of(encoder, inputs, there[0], groups, there[1])
    loss = objective.loss(features.float().view(*rows.shape, -1), there[0].view(rows.shape))
    penalty = objective.penalty()
    (loss if penalty is None else loss + penalty).backward()  # type: ignore[no-untyped-call]
    return loss.detach()
