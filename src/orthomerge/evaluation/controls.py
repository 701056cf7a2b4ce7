"""Negative controls: runs that must fail. Where one does well, something leaks, or the task is easier than it looks.

Each takes good evidence and spoils one thing. A protocol that learns from its teacher must fall to chance or below the
unchanged head when the teacher's rows are shuffled; one that learns about *this* task must gain little from another
task's inputs; and no predictions agree with permuted labels more often than `chance` says.

The first two are asked for as `Question(..., control=...)`; their records carry the `bound` not to be exceeded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from orthomerge.data.task import Split, Task
from orthomerge.errors import IncompatibleError, RecipeError
from orthomerge.evaluation.evidence import support_of, teacher_of
from orthomerge.evaluation.metrics import accuracy, hits
from orthomerge.evaluation.protocol import Evidence, Need
from orthomerge.features.features import Features
from orthomerge.records import Access, Control

__all__ = [
    "bound",
    "chance",
    "check_control",
    "other_inputs",
    "other_task",
    "permuted_labels",
    "shuffled_teacher",
]


def check_control(control: Control, *, protocol: str, needs: frozenset[Need], access: Access) -> None:
    """Refuse a control that says nothing about a protocol."""
    if not needs & {"teacher", "expert"} or "labels" in needs:
        raise RecipeError(
            f"the control {control!r} is for protocols that learn from an expert and not from labels, "
            f"which {protocol!r} does not; ask it without"
        )
    if control == "other-task" and access != "inductive":
        raise RecipeError(
            f"the control 'other-task' shows no input of the scored task, which is not {access!r} access; "
            "ask for it with inductive access"
        )


def other_task(tasks: Mapping[str, Task], task: str, split: Split) -> str:
    """The next task, in the order given, whose inputs are not those of `task`."""
    names, own = list(tasks), tasks[task][split].digest()
    place = names.index(task)
    for name in names[place + 1 :] + names[:place]:
        if tasks[name][split].digest() != own:
            return name
    raise RecipeError(f"the control 'other-task' needs a task with other inputs than those of {task!r}; add one")


def shuffled_teacher(evidence: Evidence, *, seed: int) -> Evidence:
    """The expert's logits and features handed to the wrong inputs: the same rows in random order."""
    support = support_of(evidence, who="shuffled teacher")
    if len(support) < 2:
        raise RecipeError(f"shuffling needs at least two support inputs, got {len(support)}")
    order = _shuffle(len(support), seed)
    teacher = None if evidence.teacher is None else teacher_of(evidence, who="shuffled teacher")[order]
    return replace(evidence, teacher=teacher, expert=None if evidence.expert is None else evidence.expert.take(order))


def other_inputs(
    evidence: Evidence, *, support: Features, teacher: torch.Tensor | None = None, expert: Features | None = None
) -> Evidence:
    """The support of another task, unlabelled, with what this task's expert says of those inputs and makes of them."""
    own = support_of(evidence, who="other inputs")
    if support.task == own.task:
        raise RecipeError(f"another task's inputs must come from another task, got {support.task!r} for {own.task!r}")
    seen = None if expert is None else expert.unlabelled()
    spoilt = replace(evidence, support=support.unlabelled(), teacher=teacher, expert=seen)
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


def bound(predicted: torch.Tensor, unchanged: torch.Tensor, labels: torch.Tensor) -> float:
    """What a control should not exceed: the larger of chance and the accuracy of the head as it is."""
    return max(chance(predicted, labels), accuracy(unchanged, labels))


def _shuffle(count: int, seed: int) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
