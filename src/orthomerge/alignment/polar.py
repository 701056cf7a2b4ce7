"""The orthogonal matrix nearest to another, its polar factor: whole, or as far as a head reads it.

X = A P with A orthogonal and P symmetric and not negative. With the eigenvectors V of X^T X, the columns of X V are
orthogonal, and A = Y V^T, where Y has the same columns at length 1. That costs half of an SVD but gives only half of
the digits: by what the columns are not orthogonal, F = Y^T Y - I, is about eps sigma_1^2 / (sigma_i sigma_j sqrt(d)).
Where a head reads what suffers from it, a step of Newton's method for A^T A = I and A^T X = X^T A gives them back:

    A = Y (I - M) V^T,    M_ij = F_ij sigma_i / (sigma_i + sigma_j),    but for |F|^2.

Where that is more than rounding there is a second step, and where that would not be enough the SVD.

Letters: X, A, V, Y, F, M [d, d]; sigma [d] the singular values of X; W [m, d] the first linear map of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from orthomerge.alignment.gram import forms, gram
from orthomerge.errors import NumericalError

__all__ = ["Polar", "polar_factor"]

_EPS = torch.finfo(torch.float64).eps
_LEAST = 1e-9  # share of the largest eigenvalue of X^T X that has seven digits
_DIGITS = 1e-10  # what is read of A may be wrong by, as a share of its size
_SETTLED = 3e-7  # |F| from which a step leaves only rounding
_NEAR = 1e-3  # and from which two do


@dataclass(frozen=True, eq=False)
class _Factors:
    """A = Y (I - M) V^T or, without M, Y V^T."""

    Y: torch.Tensor
    M: torch.Tensor | None
    V: torch.Tensor
    sigma: torch.Tensor


@dataclass(frozen=True, eq=False)
class Polar:
    """A, the polar factor of X [d, d], which is made only as far as it is wanted; `task` is for messages.

    `still`: X is a multiple of the identity, and so nothing is turned.
    """

    X: torch.Tensor
    task: str
    still: bool = False

    def read_by(self, W: torch.Tensor) -> torch.Tensor:
        """W A [m, d]."""
        if self.still:
            return W
        if len(W) > len(self.X):
            return W @ self.A
        if self._plain is not None:
            values, V = self._plain
            read = W @ self.X @ V / values.sqrt()
            if self._doubt(read) <= _DIGITS * float(read.norm()):
                return read @ V.T
        exact = self._exact
        read = W @ exact.Y
        return (read if exact.M is None else read - read @ exact.M) @ exact.V.T

    def along(self, c: float) -> float:
        """tr(A^T (X - c I))."""
        if self._plain is not None:
            sigma, V = self._plain[0].sqrt(), self._plain[1]
            if c * float(len(sigma) * self._weights.sum()) ** 0.5 <= _DIGITS * float(sigma.sum()):
                return float(sigma.sum() - c * (forms(self.X, V) / sigma).sum())
        return float(self._exact.sigma.sum() - c * self.A.trace())

    @cached_property
    def A(self) -> torch.Tensor:  # noqa: N802 - the letter of the legend
        """A [d, d] itself, orthogonal to rounding."""
        if self.still:
            return torch.eye(len(self.X), dtype=self.X.dtype, device=self.X.device)
        exact = self._exact
        return (exact.Y if exact.M is None else exact.Y - exact.Y @ exact.M) @ exact.V.T

    @cached_property
    def _eigen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Eigenvalues and eigenvectors of X^T X."""
        try:
            values, V = torch.linalg.eigh(gram(self.X))
        except RuntimeError:  # torch.linalg.LinAlgError, which torch does not export to type checkers
            values, V = self.X.new_zeros(len(self.X)), self.X  # the SVD will say what is wrong
        return values, V

    @cached_property
    def _plain(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The same, where X is far enough from a matrix without full rank."""
        values, V = self._eigen
        return (values, V) if float(values[0]) > _LEAST * float(values[-1]) else None

    @cached_property
    def _exact(self) -> _Factors:
        found = _corrected(self.X, self._eigen[1])
        if found is None:
            U, sigma, Vt = _svd(self.X, task=self.task)
            found = _Factors(U, None, Vt.T, sigma)
        return found

    @cached_property
    def _weights(self) -> torch.Tensor:
        """What is lost of a row of W Y: the sum over j of M_ij^2, [d]."""
        sigma = (self._eigen[0] / self._eigen[0][-1]).sqrt().float()  # which is precise enough for an estimate
        M = (sigma[:, None] + sigma).mul_(sigma).reciprocal_()
        return M.square_().sum(1).double() * (_EPS**2 / len(sigma))

    def _doubt(self, read: torch.Tensor) -> float:
        """What W A will be wrong by without a step, from W Y."""
        return math.sqrt(float(read.square().sum(0) @ self._weights))


def polar_factor(X: torch.Tensor, *, task: str) -> torch.Tensor:
    """The orthogonal matrix nearest to X, by SVD."""
    U, _, Vt = _svd(X, task=task)
    return U @ Vt


def _corrected(X: torch.Tensor, V: torch.Tensor) -> _Factors | None:
    """In all digits; nothing where X is too near to a matrix without full rank."""
    B = X @ V
    sigma = torch.linalg.vector_norm(B, dim=0)
    Y, sums = B / sigma, sigma[:, None] + sigma
    F = _defect(Y)
    M, size = F * sigma[:, None] / sums, float(F.norm())
    if _SETTLED < size <= _NEAR:
        Y = Y - Y @ M
        F, K = _defect(Y), Y.T @ B
        skew = K - F * sigma / 2  # as far as A^T X is not symmetric
        M = F / 2 - (skew - skew.T) / sums
        size = float(M.norm())
    return _Factors(Y, M, V, sigma) if size <= _SETTLED else None


def _defect(Y: torch.Tensor) -> torch.Tensor:
    """Y^T Y - I."""
    found = gram(Y)
    found.diagonal().sub_(1)
    return found


def _svd(X: torch.Tensor, *, task: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    try:
        U, sigma, Vt = torch.linalg.svd(X, full_matrices=False)
    except RuntimeError as error:
        raise NumericalError(f"an SVD for the map of {task!r} did not converge; use the aligner 'ridge'") from error
    return U, sigma, Vt
