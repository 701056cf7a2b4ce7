"""Fold a map of the features into the head that reads them; the head keeps its size.

A head reads features as they are or, in CLIP, scaled to unit length. A map A acts on what the head
reads, x, so that folding it into the head's first linear map is exact:

    head(f) = out(act(W x + b)),  x = f or f / ||f||        aligned(f) = out(act(W (A x + c) + b))
                                                                      = out(act((W A) x + (b + W c)))

Letters: W [m, d], b [m] the head's first linear map (the hidden layer, if there is one); without a bias, c = 0.
"""

from dataclasses import replace

import torch
from torch.nn.functional import normalize

from orthomerge.core.errors import IncompatibleError, NumericalError
from orthomerge.models.heads import Head, Linear


def read_by(head: Head, values: torch.Tensor) -> torch.Tensor:
    """Input of the head's first linear map for features, in float64."""
    return normalize(values.double(), dim=-1) if head.normalise else values.double()


def first_map(head: Head) -> Linear:
    return head.hidden or head.output


def with_first_map(head: Head, weight: torch.Tensor, bias: torch.Tensor | None, *, task: str) -> Head:
    """Replace the head's first linear map by one of the same shape, in the same dtype."""
    old = first_map(head)
    if (bias is None) != (old.bias is None) or weight.shape != old.weight.shape:
        raise IncompatibleError(f"the aligned head of {task!r} would not have the shape of the expert's")
    linear = Linear(weight.to(old.weight.dtype), None if bias is None or old.bias is None else bias.to(old.bias.dtype))
    if not linear.weight.isfinite().all() or (linear.bias is not None and not linear.bias.isfinite().all()):
        raise NumericalError(f"the aligned head of {task!r} is not finite; give more inputs, or another aligner")
    return replace(head, hidden=linear) if head.hidden is not None else replace(head, output=linear)


def folded(head: Head, A: torch.Tensor, shift: torch.Tensor | None = None, *, task: str) -> Head:
    """Fold x -> A x + shift into a head; A [d, d], and a shift needs a bias."""
    old = first_map(head)
    W = old.weight.double()
    bias = None if old.bias is None else old.bias.double()
    if shift is not None:
        if bias is None:
            raise IncompatibleError(f"the head of {task!r} has no bias that could take up a shift of the features")
        bias = bias + W @ shift.double()
    return with_first_map(head, W @ A.double(), bias, task=task)


def centred_rows(head: Head) -> torch.Tensor:
    """W [m, d] in float64; of an output layer minus its mean over classes, which softmax ignores."""
    W = first_map(head).weight.double()
    return W if head.hidden is not None else W - W.mean(0)


def logits_from(head: Head, inputs: torch.Tensor) -> torch.Tensor:
    """Logits from the input of the head's first map, in its dtype."""
    return logits_after(head, first_map(head)(inputs))


def logits_after(head: Head, values: torch.Tensor) -> torch.Tensor:
    if head.hidden is None or head.activation is None:
        return values
    return head.output(getattr(torch.nn.functional, head.activation)(values))
