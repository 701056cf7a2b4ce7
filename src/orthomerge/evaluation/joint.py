"""One label space for all tasks and no word about which task an input belongs to: is the merged model *one* model?

The joint benchmark of KnOTS (Stoica et al. 2024, arXiv 2410.19735). Every task's classifier reads the same merged
features; their logits stand side by side, [n, C_1 + ... + C_T], and a prediction counts only if it names the right task
and the right class. Logits are compared as they are.
Differs from the paper: the same label in two tasks ("seven" in MNIST and SVHN) is two classes here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from orthomerge.core.errors import IncompatibleError, RecipeError, some
from orthomerge.evaluation.metrics import predictions
from orthomerge.models.features import Features
from orthomerge.models.heads import Classifier, head_of, logits_of

if TYPE_CHECKING:
    from orthomerge.evaluation.encoded import EncodedTasks
    from orthomerge.models.model import Model


_ROWS = 4096


@dataclass(frozen=True)
class _Columns:
    """A classifier that reads some of the columns of its features."""

    classifier: Classifier
    columns: slice

    @property
    def labels(self) -> tuple[str, ...]:
        return self.classifier.labels

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        return self.classifier(features[:, self.columns])


def joint_features(
    encoded: EncodedTasks, models: Mapping[str, Model], classifiers: Mapping[str, Classifier]
) -> tuple[dict[str, Features], dict[str, Classifier]]:
    """Features of every task's test inputs that all heads can read, and the heads as readers of them.

    Heads that read the encoder in different ways (pooling, maximum length) get features side by side.
    """
    heads = {task: head_of(classifier) for task, classifier in classifiers.items()}
    readers, columns, width = [], {}, 0
    for head in heads.values():
        if (head.pooling, head.max_length) not in columns:
            readers.append(head)
            columns[head.pooling, head.max_length] = slice(width, width + head.width)
            width += head.width
    features = {}
    for task, model in models.items():
        parts = [encoded.features(model, task, "test", reader=reader) for reader in readers]
        features[task] = replace(parts[0], values=torch.cat([part.values for part in parts], 1))
    return features, {
        task: _Columns(classifier, columns[heads[task].pooling, heads[task].max_length])
        for task, classifier in classifiers.items()
    }


def joint_predictions(
    features: Mapping[str, Features], classifiers: Mapping[str, Classifier]
) -> dict[str, torch.Tensor]:
    """Per task of `features`, the predicted place in the joint label space: tasks in the order of `classifiers`."""
    _check_tasks(features, classifiers)
    predicted = {}
    for task, part in features.items():
        blocks = []
        for block in torch.split(part.values, _ROWS):
            logits = [logits_of(classifier, block).float() for classifier in classifiers.values()]
            blocks.append(predictions(torch.cat(logits, 1)))
        predicted[task] = torch.cat(blocks).cpu()
    return predicted


def joint_labels(features: Mapping[str, Features], classifiers: Mapping[str, Classifier]) -> dict[str, torch.Tensor]:
    """Per task of `features`, the true places in the joint label space."""
    _check_tasks(features, classifiers)
    sizes = [len(classifier.labels) for classifier in classifiers.values()]
    first = dict(zip(classifiers, accumulate(sizes, initial=0), strict=False))
    labels = {}
    for task, part in features.items():
        if part.labels is None:
            raise RecipeError(f"the joint accuracy needs labels of the scored inputs, but {task!r} has none")
        labels[task] = part.labels + first[task]
    return labels


def _check_tasks(features: Mapping[str, Features], classifiers: Mapping[str, Classifier]) -> None:
    lost = [task for task in features if task not in classifiers]
    if lost or not features:
        raise IncompatibleError(
            f"there is no classifier for {some(lost)}" if lost else "the joint accuracy needs at least one task"
        )
