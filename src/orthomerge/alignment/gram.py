"""Products of which one half is known from the other, at little more than half the price.

Letters: X [n, d] or, where it is a form, [d, d]; V [d, r].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["forms", "gram"]

_STRIP = 96  # rows that are made at once: wide enough for a product to be fast


def gram(X: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """X^T X [d, d]: what lies below its diagonal is what lies above it. `out`: where to put it."""
    d = X.shape[1]
    found = X.new_empty(d, d) if out is None else out
    if d < 2 * _STRIP:
        return found.copy_(X.T @ X)
    for start in range(0, d, _STRIP):
        end = min(start + _STRIP, d)
        found[start:end, start:] = X[:, start:end].T @ X[:, start:]
        found[end:, start:end] = found[start:end, end:].T
    return found


def forms(X: torch.Tensor, V: torch.Tensor) -> torch.Tensor:
    """v^T X v for every column v of V, [r]: what lies above the diagonal of X can be added to what lies below it."""
    folded = (X + X.T).tril_(-1)
    folded.diagonal().copy_(X.diagonal())
    found = V.new_zeros(V.shape[1])
    for start in range(0, len(X), _STRIP):
        end = start + _STRIP
        found += (V[start:end] * (folded[start:end, :end] @ V[:end])).sum(0)
    return found
