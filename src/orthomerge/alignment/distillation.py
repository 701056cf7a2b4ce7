"""How far a head's outputs are from the expert's, and which way its inputs should move: KL(expert || head).

Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network", arXiv 1503.02531, at temperature 1.

Letters: x [B, d] what a head reads; z [B, C] its logits, p = softmax(z); q [B, C] the expert's probabilities.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn.functional import kl_div, log_softmax

from orthomerge.heads import Head, Linear

__all__ = ["divergence", "input_gradient", "plain"]


def divergence(teacher: torch.Tensor, student: torch.Tensor) -> float:
    """Mean over inputs of KL(softmax(teacher) || softmax(student)), both logits [n, C]."""
    target, log_p = log_softmax(teacher.double(), 1), log_softmax(student.double(), 1)
    return float(kl_div(log_p, target, reduction="batchmean", log_target=True))


def input_gradient(head: Head, x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Of the mean divergence, in x: dKL/dz = p - q, pulled back through a `plain` head."""
    x = x.detach().requires_grad_()
    z = head(x)
    error = z.detach().softmax(1).sub_(q).div_(len(x))
    return torch.autograd.grad(z, x, error)[0]


def plain(head: Head) -> Head:
    """The head in float32, for inputs that are already normalised where it normalises."""
    hidden = None if head.hidden is None else _float(head.hidden)
    return replace(head, output=_float(head.output), hidden=hidden, normalise=False)


def _float(linear: Linear) -> Linear:
    return Linear(linear.weight.detach().float(), None if linear.bias is None else linear.bias.detach().float())
