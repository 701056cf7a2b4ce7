"""Products of which one half is known from the other, at little more than half the price.

Letters: X [n, d] or, where it is a form, [d, d]; V [d, r].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["forms", "gram", "mirror", "strips"]

_STRIP = 96  # rows that are made at once: enough for a product to be fast


def strips(d: int) -> Iterator[tuple[slice, slice]]:
    """Rows of a [d, d] matrix, and the columns from their diagonal on."""
    return ((slice(start, start + _STRIP), slice(start, d)) for start in range(0, d, _STRIP))


def mirror(C: torch.Tensor) -> torch.Tensor:
    """C, in place, with what lies right of the strips' diagonal also below it."""
    for rows, _ in strips(len(C)):
        C[rows.stop :, rows] = C[rows, rows.stop :].T
    return C


def gram(X: torch.Tensor) -> torch.Tensor:
    """X^T X [d, d]: what lies below its diagonal is what lies above it."""
    found = X.new_empty(X.shape[1], X.shape[1])
    for rows, columns in strips(len(found)):
        found[rows, columns] = X[:, rows].T @ X[:, columns]
    return mirror(found)


def forms(X: torch.Tensor, V: torch.Tensor) -> torch.Tensor:
    """v^T X v for every column v of V, [r]: what lies above the diagonal of X can be added to what lies below it."""
    folded = (X + X.T).tril_(-1)
    folded.diagonal().copy_(X.diagonal())
    found = V.new_zeros(V.shape[1])
    for rows, _ in strips(len(X)):
        found += (V[rows] * (folded[rows, : rows.stop] @ V[: rows.stop])).sum(0)
    return found
