"""What a protocol is handed and what it may demand of it: the checks that all protocols share.

`evidence_for` keeps from a protocol whatever it does not declare in `needs`, so labels cannot leak into an unlabelled
one by accident.
"""

from __future__ import annotations

import torch

from orthomerge.errors import IncompatibleError, NumericalError, RecipeError
from orthomerge.evaluation.protocol import Evidence, ReadingProtocol
from orthomerge.features.features import Features
from orthomerge.heads import Head

__all__ = ["evidence_for", "labels_of", "support_of", "teacher_of"]


def evidence_for(
    protocol: ReadingProtocol,
    head: Head,
    *,
    support: Features | None = None,
    teacher: torch.Tensor | None = None,
    expert: Features | None = None,
    seed: int = 0,
) -> Evidence:
    """Evidence with nothing in it that the protocol does not need."""
    needs = protocol.needs
    if not needs:
        return Evidence(head, seed=seed)
    if support is not None and "labels" not in needs:
        support = support.unlabelled()
    seen = expert.unlabelled() if expert is not None and "expert" in needs else None
    return Evidence(head, support, teacher if "teacher" in needs else None, seed, seen)


def support_of(evidence: Evidence, *, who: str) -> Features:
    """The support, which must be there, finite, and as wide as the head."""
    support, width = evidence.support, evidence.head.width
    if support is None:
        raise RecipeError(f"{who!r} needs features of support inputs, got none; name a split to take them from")
    if not len(support):
        raise RecipeError(f"{who!r} needs at least one support input of {support.task!r}, got 0")
    if support.values.shape[1] != width:
        raise IncompatibleError(
            f"the head of {support.task!r} reads {width} features but the support has {support.values.shape[1]}"
        )
    if not support.values.isfinite().all():
        rows = int((~support.values.isfinite()).any(1).sum())
        raise NumericalError(f"{rows} of {len(support)} support features of {support.task!r} are NaN or infinite")
    return support


def labels_of(evidence: Evidence, *, who: str) -> torch.Tensor:
    """The support's labels, one a row of the head at most."""
    support = support_of(evidence, who=who)
    if support.labels is None:
        raise RecipeError(
            f"{who!r} needs labels of its support inputs of {support.task!r}, got none; use a labelled split"
        )
    low, high, classes = int(support.labels.min()), int(support.labels.max()), len(evidence.head.labels)
    if low < 0 or high >= classes:
        raise IncompatibleError(f"labels of {support.task!r} must be in 0..{classes - 1}, got {low}..{high}")
    return support.labels


def teacher_of(evidence: Evidence, *, who: str) -> torch.Tensor:
    """The expert's logits on the support: a row for every input, a column for every label."""
    support, teacher = support_of(evidence, who=who), evidence.teacher
    if teacher is None:
        raise RecipeError(f"{who!r} needs the expert's logits on its support inputs of {support.task!r}, got none")
    wanted = (len(support), len(evidence.head.labels))
    if tuple(teacher.shape) != wanted:
        raise IncompatibleError(f"the expert's logits on {support.task!r} must be {wanted}, got {tuple(teacher.shape)}")
    if not teacher.isfinite().all():
        raise NumericalError(f"the expert's logits on {support.task!r} are not all finite")
    return teacher
