"""An expert in the form in which encoders are read: an output folder, as the merge of itself (docs/adr/0005)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from orthomerge.checkpoints.lora import Adapter
from orthomerge.checkpoints.opening import open_expert
from orthomerge.errors import RecipeError
from orthomerge.models.family import Family
from orthomerge.pipeline import merge
from orthomerge.recipe import Expert, HeadNames, Recipe

__all__ = ["is_zero_shot", "local_paths", "write_expert"]


def write_expert(
    like: Recipe, task: str, out: Path, *, family: Family, pooling: str, labels: tuple[str, ...], force: bool = False
) -> dict[str, Any]:
    """Write one expert of a recipe to `out` and give what identifies it, as in a manifest.

    A whole model comes out byte for byte. What is not one (an adapter, a bare file, the vision tower of a CLIP) needs
    the base; `labels` name the classes of a head that is made from their names.
    """
    expert = like.tasks[task]
    source, made = open_expert(expert.path), is_zero_shot(expert, family)
    if made and expert.head is None:
        expert = replace(expert, head=HeadNames(classes=labels))
    whole = not isinstance(source, Adapter) and source.config is not None and not made
    if not whole and like.base is None:
        raise RecipeError(
            f"the expert of {task!r} ({expert.path}) is not a whole model with a config and a head of its own; "
            "give the base that it was fine-tuned from too"
        )
    alone = replace(
        like,
        experts={task: expert},
        base=None if whole and like.missing == "error" else like.base,
        method="average",
        parameters={},
        vector=None,
        dtype="keep",
        family=family.name,
        pooling=pooling,
        align=None,
        fit=None,
    )
    found: dict[str, Any] = merge(alone, out=out, force=force).manifest["inputs"]["experts"][task]
    return found


def is_zero_shot(expert: Expert, family: Family) -> bool:
    """Whether the head is made from class names, and so not in the expert's checkpoint."""
    return family.head is None and (expert.head is None or expert.head.layers is None)


def local_paths(recipe: Recipe, data: Mapping[str, object]) -> Iterator[Path]:
    """What lies on this machine of experts, base and data, and must not be overlapped by an output."""
    given = [expert.path for expert in recipe.tasks.values()] + ([recipe.base] if recipe.base is not None else [])
    for text in (*given, *(str(source) for source in data.values() if isinstance(source, str | Path))):
        with suppress(OSError, RuntimeError, ValueError):  # whoever opens it says what is wrong with it
            if (path := Path(text).expanduser()).exists():
                yield path
