"""Sums over features that are all an aligner in closed form needs: one pass, any batches, any number of workers.

Legend (rows are inputs): H [n, d] merged features, T [n, e] what they are to become (the expert's features, or its
logits), C = H^T H [d, d], S = T^T H [e, d], tt = tr(T^T T). Everything is summed in float64, whatever comes in; any
split of the same rows gives the same sums but for rounding. T^T T itself is `Moments.of(T, T).C`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orthomerge.errors import IncompatibleError, NumericalError

if TYPE_CHECKING:
    import torch

__all__ = ["Moments"]

_ROWS = 4096  # rows that are brought to float64 at a time


@dataclass(frozen=True, eq=False)
class Moments:
    """n, the sums of the rows of H [d] and of T [e], C [d, d], S [e, d], and tt []; never changed in place."""

    n: int
    sum_h: torch.Tensor
    sum_t: torch.Tensor
    C: torch.Tensor
    S: torch.Tensor
    tt: torch.Tensor

    @classmethod
    def zero(cls, d: int, e: int, *, device: str | torch.device = "cpu") -> Moments:
        """The sums of no rows."""
        import torch

        shapes = ((d,), (e,), (d, d), (e, d), ())
        return cls(0, *(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    @classmethod
    def of(cls, H: torch.Tensor, T: torch.Tensor) -> Moments:
        """The sums of all rows of H and T, on the device of H."""
        _check(H, T)
        return cls.zero(H.shape[1], T.shape[1], device=H.device).add(H, T)

    @property
    def d(self) -> int:
        """Width of H."""
        return len(self.sum_h)

    @property
    def e(self) -> int:
        """Width of T."""
        return len(self.sum_t)

    def add(self, H: torch.Tensor, T: torch.Tensor) -> Moments:
        """The sums with some more rows."""
        import torch

        _check(H, T)
        if (H.shape[1], T.shape[1]) != (self.d, self.e):
            raise IncompatibleError(
                f"rows must be {self.d} and {self.e} wide as those before, got {H.shape[1]} and {T.shape[1]}"
            )
        sum_h, sum_t, C, S, tt = self.sum_h, self.sum_t, self.C, self.S, self.tt
        for start in range(0, len(H), _ROWS):
            h = H[start : start + _ROWS].detach().to(C.device, torch.float64)
            t = T[start : start + _ROWS].detach().to(C.device, torch.float64)
            for name, rows in (("H", h), ("T", t)):
                finite = rows.isfinite().all(1)
                if not finite.all():
                    place = start + int((~finite).nonzero()[0])
                    raise NumericalError(f"row {place} of {name} is not finite; no sum can hold it: check the encoder")
            sum_h, sum_t = sum_h + h.sum(0), sum_t + t.sum(0)
            C, S = torch.addmm(C, h.T, h), torch.addmm(S, t.T, h)
            tt = tt + t.square().sum()
        return Moments(self.n + len(H), sum_h, sum_t, C, S, tt)

    def __add__(self, other: Moments) -> Moments:
        """The sums of both workers' rows; `sum(parts, start=Moments.zero(d, e))` of all."""
        if (self.d, self.e) != (other.d, other.e):
            raise IncompatibleError(
                f"sums over rows {self.d} and {self.e} wide cannot be added to sums over {other.d} and {other.e}"
            )
        return Moments(
            self.n + other.n,
            self.sum_h + other.sum_h,
            self.sum_t + other.sum_t,
            self.C + other.C,
            self.S + other.S,
            self.tt + other.tt,
        )

    @property
    def mean_h(self) -> torch.Tensor:
        """The mean row of H, [d]."""
        return self.sum_h / self._count()

    @property
    def mean_t(self) -> torch.Tensor:
        """The mean row of T, [e]."""
        return self.sum_t / self._count()

    def centred(self) -> Moments:
        """The sums that H and T would give with their means taken off, to about 1e-16 (mean / deviation)^2."""
        import torch

        mean_h, mean_t = self.mean_h, self.mean_t
        return Moments(
            self.n,
            torch.zeros_like(self.sum_h),
            torch.zeros_like(self.sum_t),
            self.C - torch.outer(self.sum_h, mean_h),
            self.S - torch.outer(self.sum_t, mean_h),
            self.tt - self.sum_t @ mean_t,
        )

    def seen_through(self, Q: torch.Tensor) -> Moments:
        """The sums of H Q and T Q, where both are [n, d] and Q is [d, r]; tt stays that of T."""
        return Moments(self.n, Q.T @ self.sum_h, Q.T @ self.sum_t, Q.T @ self.C @ Q, Q.T @ self.S @ Q, self.tt)

    def _count(self) -> int:
        if not self.n:
            raise NumericalError("the mean of no rows is not defined; add some inputs first")
        return self.n


def _check(H: torch.Tensor, T: torch.Tensor) -> None:
    if H.ndim != 2 or T.ndim != 2 or len(H) != len(T):
        raise IncompatibleError(
            f"H and T must be matrices with a row for each input, got {tuple(H.shape)} and {tuple(T.shape)}"
        )
