"""Adam by torch and autograd to hold ours against, and the divergence as torch has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import kl_div, log_softmax


def by_autograd(
    parameters: Sequence[torch.Tensor], loss: Callable[[], torch.Tensor], *, steps: int, lr: float
) -> list[torch.Tensor]:
    """What torch's own Adam makes of copies of the parameters when it minimises a loss written as printed."""
    optimiser = torch.optim.Adam(parameters, lr=lr)
    for _ in range(steps):
        optimiser.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return [parameter.detach() for parameter in parameters]


def divergence(teacher: torch.Tensor, student: torch.Tensor) -> float:
    """Mean over inputs of KL(softmax(teacher) || softmax(student)), both logits [n, C], as torch has it."""
    target, log_p = log_softmax(teacher.double(), 1), log_softmax(student.double(), 1)
    return float(kl_div(log_p, target, reduction="batchmean", log_target=True))
