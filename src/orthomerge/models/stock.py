"""Which stock class of transformers computes what a task's head does, and under which names it keeps its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orthomerge.models.heads import Head

if TYPE_CHECKING:
    import torch

    from orthomerge.models.family import Family
    from orthomerge.models.heads import Extra


# Number of layers -> what stands before `weight` and `bias` of each, first to last.
PARTS = {1: ("",), 2: ("hidden.", "")}


def why_not_stock(family: Family, classifier: Head | Extra) -> str | None:
    """Why no stock class computes what a classifier does; None where one does."""
    if not isinstance(classifier, Head):
        return (
            f"its classifier is a head behind a module of {classifier.kind!r}, for which transformers has no place; "
            "align the merge with an aligner that gives a head, such as auto"
        )
    if family.architecture is None or family.head is None:
        return f"transformers has no classifier that computes what {family.name!r} does"
    pooling = classifier.pooling or family.default_pooling
    if pooling != family.default_pooling:
        return f"{family.architecture} reads features by {family.default_pooling!r}, this head by {pooling!r}"
    built = (2 if classifier.hidden is not None else 1, classifier.activation, classifier.normalise)
    if built != (len(family.head.layers), family.head.activation, family.head.normalise):
        return f"the head is built otherwise than in {family.architecture}"
    return None


def head_names(family: Family, head: Head) -> dict[str, str]:
    """Part of a head -> name on disk: the stock classifier's where the layers are like its own."""
    parts = head.tensors()
    layout = family.head
    if layout is None or len(layout.layers) != (2 if head.hidden is not None else 1):
        return {part: part for part in parts}
    return {
        prefix + piece: f"{layer}.{piece}"
        for layer, prefix in zip(layout.layers, PARTS[len(layout.layers)], strict=True)
        for piece in ("weight", "bias")
        if prefix + piece in parts
    }


def named_tensors(family: Family, head: Head) -> dict[str, torch.Tensor]:
    """A head's tensors by their names on disk."""
    tensors = head.tensors()
    return {name: tensors[part] for part, name in head_names(family, head).items()}
