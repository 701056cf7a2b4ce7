from collections.abc import Mapping, Sequence
from typing import Any, Literal

from orthomerge.models.experts import Experts
from orthomerge.models.opening import HeadNames, Named, opening_of


def open(  # noqa: A001 - used as om.open
    experts: Named,
    *,
    base: Any = None,
    pooling: str | None = None,
    prefix: str | None = None,
    family: str | None = None,
    ignore: Sequence[str] = (),
    missing: Literal["error", "base"] = "error",
    check_base: bool = True,
    heads: Mapping[str, HeadNames | Mapping[str, Any]] | None = None,
    labels: Mapping[str, Sequence[str]] | None = None,
) -> Experts:
    """Open experts and their base from headers and compare them; all problems are listed at once.

    `experts`: task name -> folder, file, adapter, hub id, live model, or (live model, tokenizer); or a list of paths.
    `base`: the model they were fine-tuned from, in any of these forms. `pooling`: for heads whose expert records none.
    `prefix`: of the encoder in a module of your own. `ignore`: patterns of tensors to leave out. `missing`: "base"
    takes tensors that an expert lacks from the base. `heads` and `labels`: by task.
    """
    opening, live = opening_of(
        experts,
        base=base,
        heads=heads,
        labels=labels,
        pooling=pooling,
        encoder_prefix=prefix,
        family=family,
        ignore=tuple(ignore),
        missing=missing,
        check_base=check_base,
    )
    return Experts(opening, live)
