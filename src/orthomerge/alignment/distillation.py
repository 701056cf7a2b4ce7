"""How far a head's outputs are from the expert's, and which way its inputs should move: KL(expert || head).

Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network", arXiv 1503.02531, at temperature 1.

Letters: x [B, d] what a head reads; z [B, C] its logits, p = softmax(z); q [B, C] the expert's probabilities.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn.functional import kl_div, log_softmax

from orthomerge.models.heads import Head


def divergence(teacher: torch.Tensor, student: torch.Tensor) -> float:
    """Mean over inputs of KL(softmax(teacher) || softmax(student)), both logits [n, C]."""
    target, log_p = log_softmax(teacher.double(), 1), log_softmax(student.double(), 1)
    return float(kl_div(log_p, target, reduction="batchmean", log_target=True))


def input_gradient(head: Head, x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Of the mean divergence, in x [..., B, d]: dKL/dz = p - q, pulled back through a `plain` head."""
    h = x if head.hidden is None else head.hidden(x).requires_grad_()
    seen = h if head.activation is None else getattr(torch.nn.functional, head.activation)(h)
    with torch.no_grad():
        found = head.output(seen).softmax(-1).sub_(q).div_(x.shape[-2]) @ head.output.weight
    if head.hidden is None:
        return found
    return torch.autograd.grad(seen, h, found)[0] @ head.hidden.weight


def plain(head: Head, device: torch.device | str = "cpu") -> Head:
    """The head in float32, for inputs that are already normalised where it normalises."""
    tensors = {name: tensor.detach().to(device, torch.float32) for name, tensor in head.tensors().items()}
    return replace(head.with_tensors(tensors), normalise=False)
