"""Merge experts into one model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import RecipeError
from orthomerge.merging.merge import merge_opened
from orthomerge.models.experts import Experts, open_experts
from orthomerge.models.opening import Named, opening_of

if TYPE_CHECKING:
    from orthomerge.data.task import Split
    from orthomerge.models.model import Model


AUTO = "auto"
_PLAIN, _FITTED = "task_arithmetic", "realign"  # what "auto" is without inputs, and with them


def merge(
    experts: Experts | Named,
    method: Any = AUTO,
    *,
    base: Any = None,
    data: Any = None,
    dtype: str = "keep",
    seed: int = 0,
    device: str | None = None,
    vector: str | None = None,
    split: Split = "train",
    limit: int | None = None,
    **options: Any,
) -> Model:
    """Merge experts into one model with all their heads; nothing is computed before its weights are used.

    `experts`: as for `open`, or what `open` gave. `method`: a name with its `options`, or an object such as
    `Ties(density=0.2)`. `data`: unlabelled inputs by task, for methods that are fitted to inputs; these are fitted now.
    `vector`: an expression over the task vectors, such as "c + (b - a)". `device`: where a fit, or a method that
    decomposes matrices, is computed.
    """
    if not isinstance(experts, Experts):
        opening, live = opening_of(experts, base=base)
        experts = open_experts(opening, live)
    elif base is not None:
        raise RecipeError("these experts were opened with their base already; leave 'base' out")
    if isinstance(method, str) and method == AUTO:
        method = _PLAIN if data is None else _FITTED
    if data is not None:
        from orthomerge.fitting.fit import fit

        where = device or "auto"
        return fit(experts, method, data, options, dtype=dtype, seed=seed, device=where, split=split, limit=limit)
    return merge_opened(experts, method, options, dtype=dtype, seed=seed, device=device or "cpu", vector=vector)
