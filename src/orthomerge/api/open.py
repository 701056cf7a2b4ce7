"""Open a base and experts: headers only, every problem listed at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from orthomerge.core.errors import RecipeError, nearest
from orthomerge.core.schema import build
from orthomerge.models.experts import Experts, open_experts
from orthomerge.models.live import Live, as_live
from orthomerge.models.opening import Expert, HeadNames, Opening, reference

Named = Mapping[str, Any] | Sequence[str | Path]
_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


def open(  # noqa: A001 - the verb of the library, used as om.open
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
    """Open experts and their base, read headers only, and compare them.

    `experts`: task name -> folder, file, adapter, hub id, live model, or (live model, tokenizer); a list of paths takes
    the folders' names. `base`: the model they were fine-tuned from, in any of these forms. `pooling`: how all heads
    read the encoder, where experts do not say. `prefix`: of the encoder in a module of your own. `ignore`: patterns of
    tensors to leave out. `missing`: "base" takes tensors that an expert lacks from the base. `heads` and `labels`: by
    task.
    """
    opening, live = opening_of(experts, base=base, heads=heads or {}, labels=labels or {})
    opening = replace(
        opening,
        pooling=pooling,
        encoder_prefix=prefix,
        family=family,
        ignore=tuple(ignore),
        missing=missing,
        check_base=check_base,
    )
    return open_experts(opening, live)


def opening_of(
    experts: Named,
    *,
    base: Any = None,
    heads: Mapping[str, HeadNames | Mapping[str, Any]] | None = None,
    labels: Mapping[str, Sequence[str]] | None = None,
) -> tuple[Opening, dict[str, Live]]:
    """What to open, as plain data, and the models that are in memory already (the base under "")."""
    named = experts if isinstance(experts, Mapping) else {_task_name(path): path for path in experts}
    if len(named) < len(experts):
        raise RecipeError("two experts have folders of the same name; give a mapping from task name to path")
    for what, keys in (("labels", labels or {}), ("heads", heads or {})):
        for task in keys:
            if task not in named:
                raise RecipeError(f"'{what}' names {task!r}, which is no expert; {nearest(task, named)}")
    live = {task: model for task, value in {**named, "": base}.items() if (model := as_live(value)) is not None}
    read = {task: _expert(task, value, heads or {}, labels or {}) for task, value in named.items()}
    return Opening(read, None if base is None else reference("the base", base)), live


def _task_name(path: str | Path) -> str:
    """The task of an expert that is given by its path alone: `topic` for models/topic, tone.pth and org/topic@main."""
    name = Path(path).name.partition("@")[0]
    return name.removesuffix(Path(name).suffix) if Path(name).suffix in _FILES else name


def _expert(
    task: str,
    value: Any,
    heads: Mapping[str, HeadNames | Mapping[str, Any]],
    labels: Mapping[str, Sequence[str]],
) -> Expert:
    """One expert as plain data; a live model only has a name here."""
    expert = value if isinstance(value, Expert) else Expert(reference(f"the expert of {task!r}", value))
    if task in labels:
        if isinstance(labels[task], str):
            raise RecipeError(f"the 'labels' of {task!r} must be a list of names, got one text")
        expert = replace(expert, labels=tuple(labels[task]))
    if task in heads:
        head = heads[task]
        named = head if isinstance(head, HeadNames) else build(HeadNames, head, where=f"the head of {task!r}")
        expert = replace(expert, head=named)
    return expert
