"""Negative controls: runs that must fail. Where one does well, something leaks, or the task is easier than it looks.

Each takes good evidence and spoils one thing. A protocol that learns from its teacher must fall to chance or below the
unchanged head when the teacher's rows are shuffled; one that learns about *this* task must gain little from another
task's inputs; and no predictions agree with permuted labels more often than `chance` says.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from orthomerge.errors import IncompatibleError, RecipeError
from orthomerge.evaluation.evidence import support_of, teacher_of
from orthomerge.evaluation.metrics import hits
from orthomerge.evaluation.protocol import Evidence
from orthomerge.features.features import Features

__all__ = ["chance", "other_inputs", "permuted_labels", "shuffled_teacher"]


def shuffled_teacher(evidence: Evidence, *, seed: int) -> Evidence:
    """The expert's logits handed to the wrong inputs: the same rows in random order."""
    teacher = teacher_of(evidence, who="shuffled teacher")
    if len(teacher) < 2:
        raise RecipeError(f"shuffling needs at least two support inputs, got {len(teacher)}")
    return replace(evidence, teacher=teacher[_shuffle(len(teacher), seed)])


def other_inputs(evidence: Evidence, *, support: Features, teacher: torch.Tensor | None = None) -> Evidence:
    """The support of another task, unlabelled, with what this task's expert (`teacher`) says about those inputs."""
    own = support_of(evidence, who="other inputs")
    if support.task == own.task:
        raise RecipeError(f"another task's inputs must come from another task, got {support.task!r} for {own.task!r}")
    spoilt = replace(evidence, support=Features(support.values, support.task, support.split), teacher=teacher)
    support_of(spoilt, who="other inputs")
    if teacher is not None:
        teacher_of(spoilt, who="other inputs")
    return spoilt


def permuted_labels(labels: torch.Tensor, *, seed: int) -> torch.Tensor:
    """The labels of the scored inputs in random order."""
    if labels.ndim != 1 or len(labels) < 2:
        raise IncompatibleError(f"permuting needs a list of at least two labels, got {tuple(labels.shape)}")
    return labels[_shuffle(len(labels), seed)]


def chance(predicted: torch.Tensor, labels: torch.Tensor) -> float:
    """The accuracy to expect when predictions and labels have nothing to do with each other: sum_c p_c q_c."""
    hits(predicted, labels)  # the same checks
    size = int(torch.stack([predicted.max(), labels.max()]).max()) + 1
    p, q = (values.bincount(minlength=size).double() / len(values) for values in (predicted, labels))
    return float((p * q).sum())


def _shuffle(count: int, seed: int) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
