"""Second moments of pairs of features, from which rotations are solved; those of folds add up to those of all inputs.

Letters: H, T [n, d] what the head reads of the merged encoder and of the expert, rows h and t; C = sum h h^T, S = sum
t h^T [d, d]; Q [d, r] some directions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Moments:
    """n, the sums of the rows of H and T [d], C and S [d, d]; in float64."""

    n: int
    sum_h: torch.Tensor
    sum_t: torch.Tensor
    C: torch.Tensor
    S: torch.Tensor

    @classmethod
    def of(cls, H: torch.Tensor, T: torch.Tensor) -> Moments:
        """The moments of all rows."""
        H, T = H.double(), T.double()
        return cls(len(H), H.sum(0), T.sum(0), H.T @ H, T.T @ H)

    @classmethod
    def total(cls, parts: Iterable[Moments]) -> Moments:
        """The moments of the rows of all parts, of which there must be one."""
        first, *rest = parts
        return sum(rest, start=first)

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.n + other.n,
            self.sum_h + other.sum_h,
            self.sum_t + other.sum_t,
            self.C + other.C,
            self.S + other.S,
        )

    @property
    def d(self) -> int:
        return len(self.sum_h)

    @property
    def mean_h(self) -> torch.Tensor:
        """The mean row of H, [d]."""
        return self.sum_h / self.n

    @property
    def mean_t(self) -> torch.Tensor:
        """The mean row of T, [d]."""
        return self.sum_t / self.n

    def centred(self) -> Moments:
        """The moments that H and T would have with their means taken off, to about 1e-16 (mean / deviation)^2."""
        return Moments(
            self.n,
            torch.zeros_like(self.sum_h),
            torch.zeros_like(self.sum_t),
            self.C - torch.outer(self.sum_h, self.mean_h),
            self.S - torch.outer(self.sum_t, self.mean_h),
        )

    def through(self, Q: torch.Tensor) -> Moments:
        """The moments of H Q and T Q."""
        return Moments(self.n, Q.T @ self.sum_h, Q.T @ self.sum_t, Q.T @ self.C @ Q, Q.T @ self.S @ Q)
