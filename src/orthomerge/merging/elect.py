"""Trim, elect, merge: the three steps of TIES, which its variants combine in different ways; and sums of rows.

Yadav et al., "TIES-merging", 2023, arXiv 2306.01708, section 3. Pure functions of the rows of a block, one per expert.

An entry *agrees* when its sign is the elected one; multiplied by that sign it is then positive, so `relu(row * sign)`
is its magnitude and zero for all others. Comparisons, masks and `where` would take ten times as long on a CPU.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from orthomerge.core.errors import RecipeError

PerExpert = float | tuple[float, ...]


def per_expert(value: PerExpert, count: int) -> tuple[float, ...]:
    if not isinstance(value, tuple):
        return (value,) * count
    if len(value) != count:
        raise RecipeError(
            f"a number per expert must be one number or {count}, got {len(value)}; give one, or one per expert"
        )
    return value


def scaled_sum(rows: torch.Tensor | Sequence[torch.Tensor], scale: PerExpert) -> torch.Tensor:
    """sum_t scale_t * rows[t], added in the order of the experts."""
    numbers = per_expert(scale, len(rows))
    result = rows[0] * numbers[0]
    for row, number in zip(rows[1:], numbers[1:], strict=True):
        result.add_(row, alpha=number)
    return result


def total(rows: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    return scaled_sum(rows, 1.0)


def trim(rows: Iterable[torch.Tensor], thresholds: Sequence[float]) -> list[torch.Tensor]:
    """Zero the entries with |x| < threshold, one threshold per row; 0 keeps all, infinity none."""
    return [_trimmed(row, limit) for row, limit in zip(rows, thresholds, strict=True)]


def _trimmed(row: torch.Tensor, limit: float) -> torch.Tensor:
    # hardshrink zeroes |x| <= lambda, and |x| <= (the float32 just under the limit) is |x| < limit.
    return torch.hardshrink(row, float(np.nextafter(np.float32(limit), np.float32(0)))) if limit > 0 else row


def elect_sign(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Elected signs: +1 where the entries sum to zero or more, else -1."""
    return torch.copysign(rows[0].new_ones(()), total(rows))


def disjoint(
    rows: Sequence[torch.Tensor], sign: torch.Tensor, *, join: Callable[..., torch.Tensor] = torch.add
) -> torch.Tensor:
    """Sum of the entries that agree; their maximum in magnitude with `join` = torch.maximum."""
    result = _agreeing(rows[0], sign)
    for row in rows[1:]:
        join(result, _agreeing(row, sign), out=result)
    return result.mul_(sign)


def disjoint_mean(
    rows: Sequence[torch.Tensor],
    sign: torch.Tensor,
    *,
    factors: Sequence[float] | None = None,
    votes: Sequence[float] | None = None,
) -> torch.Tensor:
    """sum_t factors_t x_t / sum_t votes_t over the entries that agree, each 1 by default; votes of 0 do not divide."""
    factors = factors or (1.0,) * len(rows)
    votes = votes or (1.0,) * len(rows)
    result, count = torch.zeros_like(sign), torch.zeros_like(sign)
    for row, factor, vote in zip(rows, factors, votes, strict=True):
        agreeing = _agreeing(row, sign)
        result.add_(agreeing, alpha=factor)
        count.add_(agreeing.sign_(), alpha=vote)
    none = torch.eq(count, 0, out=torch.empty_like(count))  # 1.0 where true
    return result.mul_(sign).div_(count.add_(none))


def _agreeing(row: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
    return torch.mul(row, sign).relu_()
