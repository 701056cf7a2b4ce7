"""Saving what an aligner fitted, so that it says on disk what it said in memory and costs what it should."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from orthomerge.classifiers import EXTRA, load_classifier, rebuilt, write_classifier
from orthomerge.errors import IncompatibleError, NumericalError, RecipeError
from orthomerge.heads import Classifier, Head
from orthomerge.output import plain

if TYPE_CHECKING:
    import torch

    from orthomerge.alignment.aligner import Alignment, Extra

__all__ = ["Fitted", "save_fitted"]

_ROWS = 256  # inputs on which what was saved is compared with what was fitted
_MOST_GAP = 1e-5  # between their logits, as a share of the largest


@dataclass(frozen=True)
class Fitted:
    """An alignment of one task. `old`: the head in whose place it comes; `sample`: merged features [n, d]."""

    task: str
    alignment: Alignment
    old: Head
    sample: torch.Tensor
    expert: dict[str, Any]


def save_fitted(folder: Path, fitted: Fitted) -> dict[str, Any]:
    """Write a task's classifier and read it back: it must say what was fitted, with a head like the old one.

    Heads in half precision are rounded to it, as the old one was; `rounding` says by how much that moves the logits.
    """
    import torch

    task, old, made = fitted.task, fitted.old, _checked(fitted)
    dtype = old.output.weight.dtype
    meant = _cast(made, dtype, folder)
    write_classifier(folder, meant)
    found = load_classifier(folder)
    if _specs(_head(found)) != _specs(old):
        raise IncompatibleError(f"the aligned head of {task!r} has not the shapes and dtypes of the one that was there")
    narrow = dtype not in (torch.float32, torch.float64)
    sample = fitted.sample[:_ROWS].double()
    rounding, gap = (_gap(one, found, sample, folder) for one in (made, meant if narrow else made))
    if not gap <= _MOST_GAP:
        raise NumericalError(
            f"the logits of {task!r} on disk are not those that were fitted: they differ by {gap:.1e} of the largest "
            f"in {str(dtype).removeprefix('torch.')}; use another aligner, or experts in float32"
        )
    tensors = {} if isinstance(found, Head) else found.extra_tensors()
    size = (folder / EXTRA).stat().st_size if tensors else 0
    return {
        "facts": plain({**fitted.alignment.facts, **({"rounding": rounding} if narrow else {})}),
        "extra": {"parameters": sum(tensor.numel() for tensor in tensors.values()), "bytes": size},
        "expert": fitted.expert,
    }


def _checked(fitted: Fitted) -> Head | Extra:
    made: Classifier = fitted.alignment.classifier
    if made.labels != fitted.old.labels:
        raise IncompatibleError(f"the aligned classifier of {fitted.task!r} has other labels than the head it replaces")
    if not isinstance(made, Head) and not hasattr(made, "extra_tensors"):
        raise RecipeError(
            f"the classifier of {fitted.task!r} is a {type(made).__name__}, which cannot be saved; an aligner must "
            "return a Head, or a head behind a module that has 'extra_tensors'"
        )
    return cast("Head | Extra", made)


def _head(classifier: Head | Extra) -> Head:
    return classifier if isinstance(classifier, Head) else classifier.head


def _cast(classifier: Head | Extra, dtype: torch.dtype, where: Path) -> Head | Extra:
    head = _head(classifier)
    head = head.with_tensors({name: tensor.detach().to("cpu", dtype) for name, tensor in head.tensors().items()})
    if isinstance(classifier, Head):
        return head
    tensors = {name: tensor.detach().to("cpu", dtype) for name, tensor in classifier.extra_tensors().items()}
    return rebuilt(classifier.kind, head, tensors, where=where)


def _specs(head: Head) -> dict[str, tuple[Any, ...]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in head.tensors().items()}


def _gap(one: Head | Extra, other: Head | Extra, sample: torch.Tensor, where: Path) -> float:
    """The largest difference between logits, as a share of the largest logit; computed in float64."""
    import torch

    ours, theirs = (_cast(each, torch.float64, where)(sample) for each in (one, other))
    largest = ours.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    return float((ours - theirs).abs().max() / largest)
