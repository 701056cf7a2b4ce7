"""An alignment as it will be saved, in the dtype of the head that it replaces: what is scored is what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from orthomerge.core.errors import IncompatibleError, NumericalError, RecipeError
from orthomerge.models.heads import Classifier, Head, rebuilt
from orthomerge.models.writing import plain

if TYPE_CHECKING:
    from orthomerge.alignment.aligners import Alignment
    from orthomerge.models.heads import Extra


_ROWS = 256  # inputs on which rounding is measured
_MOST_GAP = 1e-5  # between logits in float32, as a share of the largest


def as_saved(task: str, alignment: Alignment, old: Head, sample: torch.Tensor) -> tuple[Head | Extra, dict[str, Any]]:
    """The classifier in the dtype of `old`, and facts about it. `sample`: merged features [n, d].

    Heads in half precision are rounded to it, as the old one was; `rounding` says by how much that moves the logits.
    """
    exact = _checked(task, alignment.classifier, old)
    dtype = old.output.weight.dtype
    rounded = cast_classifier(exact, dtype)
    if _specs(_head(rounded)) != _specs(old):
        raise IncompatibleError(f"the aligned head of {task!r} has not the shapes and dtypes of the one that was there")
    narrow = dtype not in (torch.float32, torch.float64)
    gap = _gap(exact, rounded, sample[:_ROWS].double())
    if not narrow and not gap <= _MOST_GAP:
        raise NumericalError(
            f"the logits of {task!r} change by {gap:.1e} of the largest when they are rounded to "
            f"{str(dtype).removeprefix('torch.')}; use another aligner, or experts in float32"
        )
    tensors = {} if isinstance(rounded, Head) else rounded.extra_tensors()
    extra = {
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
    }
    facts = plain({**alignment.facts, **({"rounding": gap} if narrow else {})})
    return rounded, {"facts": facts, "extra": extra}


def cast_classifier(classifier: Head | Extra, dtype: torch.dtype) -> Head | Extra:
    """The same classifier on the CPU in another dtype."""
    head = _head(classifier)
    head = head.with_tensors({name: tensor.detach().to("cpu", dtype) for name, tensor in head.tensors().items()})
    if isinstance(classifier, Head):
        return head
    tensors = {name: tensor.detach().to("cpu", dtype) for name, tensor in classifier.extra_tensors().items()}
    return rebuilt(classifier.kind, head, tensors, where=Path(classifier.kind))


def _checked(task: str, classifier: Classifier, old: Head) -> Head | Extra:
    """A classifier that can be saved, reading the encoder as the old head does."""
    if classifier.labels != old.labels:
        raise IncompatibleError(f"the aligned classifier of {task!r} has other labels than the head it replaces")
    if isinstance(classifier, Head):
        return classifier.reading_as(old)
    if not hasattr(classifier, "extra_tensors"):
        raise RecipeError(
            f"the classifier of {task!r} is a {type(classifier).__name__}, which cannot be saved; an aligner must "
            "return a Head, or a head behind a module that has 'extra_tensors'"
        )
    extra = cast("Extra", classifier)
    return rebuilt(extra.kind, extra.head.reading_as(old), extra.extra_tensors(), where=Path(extra.kind))


def _head(classifier: Head | Extra) -> Head:
    return classifier if isinstance(classifier, Head) else classifier.head


def _specs(head: Head) -> dict[str, tuple[Any, ...]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in head.tensors().items()}


def _gap(one: Head | Extra, other: Head | Extra, sample: torch.Tensor) -> float:
    """The largest difference between logits, as a share of the largest logit; computed in float64."""
    ours, theirs = (cast_classifier(each, torch.float64)(sample) for each in (one, other))
    largest = ours.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    return float((ours - theirs).abs().max() / largest)
