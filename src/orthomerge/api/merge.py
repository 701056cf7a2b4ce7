"""Merge experts into one model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import RecipeError
from orthomerge.data.reading import sources_of
from orthomerge.merging.merge import merge_opened
from orthomerge.models.experts import Experts, open_experts
from orthomerge.models.opening import Named, opening_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orthomerge.data.task import Split
    from orthomerge.evaluation.scale import ScaleSearch
    from orthomerge.models.model import Model
    from orthomerge.runs.recipe import Recipe


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

    `experts`: as for `open`, or what `open` returned. `method`: a name with its `options`, or an object such as
    `Ties(density=0.2)`. `data`: unlabelled inputs by task, or a folder with a file per task, for methods that are
    fitted to inputs; these are fitted now. `scale="auto"`: the best on the validation inputs of `data`. `vector`: an
    expression over the task vectors, such as "c + (b - a)". `device`: where a fit, or a method that decomposes
    matrices, is computed.
    """
    if not isinstance(experts, Experts):
        opening, live = opening_of(experts, base=base)
        experts = open_experts(opening, live)
    elif base is not None:
        raise RecipeError("these experts were opened with their base already; leave 'base' out")
    searched = isinstance(method, str) and options.get("scale") == AUTO
    if isinstance(method, str) and method == AUTO:
        method = _PLAIN if data is None or searched else _FITTED
    data = None if data is None else sources_of(data, experts.tasks)
    if searched:
        search = _search(experts, method, data, options, seed=seed, device=device or "cpu", vector=vector)
        options, data = {**options, "scale": search.best}, None
    if data is not None:
        from orthomerge.fitting.fit import fit

        where = device or "auto"
        return fit(experts, method, data, options, dtype=dtype, seed=seed, device=where, split=split, limit=limit)
    return merge_opened(experts, method, options, dtype=dtype, seed=seed, device=device or "cpu", vector=vector)


def search_scale(recipe: Recipe, data: Mapping[str, Any] | str | None) -> ScaleSearch:
    """Score a recipe's merge at every scale on the validation splits of `data`, for its `scale: auto`."""
    experts = open_experts(recipe.opening).check()
    return _search(
        experts,
        recipe.method,
        data,
        recipe.parameters,
        seed=recipe.seed,
        device=recipe.device,
        vector=recipe.vector,
    )


def _search(
    experts: Experts,
    method: Any,
    data: Mapping[str, Any] | str | None,
    options: Mapping[str, Any],
    **how: Any,
) -> ScaleSearch:
    from orthomerge.evaluation.scale import search_scale as search
    from orthomerge.models.encoding import Encoding

    sources = sources_of(data or {}, experts.tasks)
    for task in experts.tasks:
        if task not in sources:
            raise RecipeError(f"'scale: auto' is chosen on validation data of every task; give --data {task}=PATH")
    inputs = {task: sources[task] for task in experts.tasks}
    return search(experts, method, inputs, options, encoding=Encoding(None), **how)
