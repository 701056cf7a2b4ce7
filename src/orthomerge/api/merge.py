from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orthomerge.api.open import open as open_named
from orthomerge.core.errors import RecipeError
from orthomerge.data.reading import sources_of
from orthomerge.data.task import Split
from orthomerge.merging.merge import merge_opened
from orthomerge.models.experts import Experts
from orthomerge.models.model import Model
from orthomerge.models.opening import Named

if TYPE_CHECKING:
    from orthomerge.evaluation.scale import ScaleSearch

AUTO = "auto"


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
    """Merge experts into one model with all their heads. Without `data`, weights are computed when they are used.

    `experts`: as in `open`, or its result. `method`: a name with its `options`, or an object such as
    `Ties(density=0.2)`. `data`: unlabelled inputs by task, or a folder with a file per task, to which the merge is
    fitted. `scale="auto"`: search the best scale on the validation inputs of `data`. `vector`: an expression over task
    vectors, such as "c + (b - a)". `device`: for a fit, or for a method that decomposes matrices.
    """
    if not isinstance(experts, Experts):
        experts = open_named(experts, base=base)
    elif base is not None:
        raise RecipeError("these experts were already opened with a base; leave out 'base'")
    searched = isinstance(method, str) and options.get("scale") == AUTO
    if isinstance(method, str) and method == AUTO:
        method = "task_arithmetic" if data is None or searched else "realign"
    data = None if data is None else sources_of(data, experts.tasks)
    if searched:
        search = search_scale(experts, method, data, options, seed=seed, device=device or "cpu", vector=vector)
        options, data = {**options, "scale": search.best}, None
    if data is not None:
        from orthomerge.fitting.fit import fit

        return fit(
            experts, method, data, options, dtype=dtype, seed=seed, device=device or "auto", split=split, limit=limit
        )
    return merge_opened(experts, method, options, dtype=dtype, seed=seed, device=device or "cpu", vector=vector)


def search_scale(
    experts: Experts, method: Any, data: Mapping[str, Any] | str | None, options: Mapping[str, Any], **how: Any
) -> ScaleSearch:
    """Score a merge at every scale on the validation splits of `data`. `how`: seed, device and vector."""
    from orthomerge.evaluation.scale import search_scale as search
    from orthomerge.models.encoding import Encoding

    sources = sources_of(data or {}, experts.tasks)
    for task in experts.tasks:
        if task not in sources:
            raise RecipeError(f"'scale: auto' is chosen on validation data of every task; give --data {task}=PATH")
    inputs = {task: sources[task] for task in experts.tasks}
    return search(experts, method, inputs, options, encoding=Encoding(None), **how)
