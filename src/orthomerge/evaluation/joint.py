"""One label space for all tasks and no word about which task an input belongs to: is the merged model *one* model?

The joint benchmark of KnOTS (Stoica et al. 2024, arXiv 2410.19735). Every task's classifier reads the same merged
features; their logits stand side by side, [n, C_1 + ... + C_T], and a prediction counts only if it names the right task
and the right class.

Logits are compared as they are. `normalise` takes log-softmax within each task first: heads of different temperature
become comparable, but a task of few classes is then favoured, since its probabilities are larger.
Differs from the paper: the same label in two tasks ("seven" in MNIST and SVHN) is two classes here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from orthomerge.core.errors import IncompatibleError, RecipeError, some
from orthomerge.evaluation.metrics import accuracy, predictions
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
    start: int
    stop: int

    @property
    def labels(self) -> tuple[str, ...]:
        return self.classifier.labels

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        return self.classifier(features[:, self.start : self.stop])


def joint_features(
    encoded: EncodedTasks, models: Mapping[str, Model], classifiers: Mapping[str, Classifier]
) -> tuple[dict[str, Features], dict[str, Classifier]]:
    """Features of every task's test inputs that all heads can read, and the heads as readers of them.

    Heads that read the encoder in different ways (pooling, maximum length) get features side by side.
    """
    heads = {task: head_of(classifier) for task, classifier in classifiers.items()}
    ways = {task: (head.pooling, head.max_length) for task, head in heads.items()}
    first = {way: next(task for task in ways if ways[task] == way) for way in ways.values()}  # who reads in each way
    starts = dict(zip(first, accumulate((heads[task].width for task in first.values()), initial=0), strict=False))
    features = {}
    for task, model in models.items():
        parts = [encoded.features(model, task, "test", reader=heads[reader]) for reader in first.values()]
        features[task] = replace(parts[0], values=torch.cat([part.values for part in parts], 1))
    if len(first) == 1:
        return features, dict(classifiers)
    readers = {
        task: _Columns(classifier, starts[ways[task]], starts[ways[task]] + heads[task].width)
        for task, classifier in classifiers.items()
    }
    return features, dict(readers)


def joint_predictions(
    features: Mapping[str, Features], classifiers: Mapping[str, Classifier], *, normalise: bool = False
) -> dict[str, torch.Tensor]:
    """Per task of `features`, the predicted place in the joint label space: tasks in the order of `classifiers`."""
    _known(features, classifiers)
    return {
        task: torch.cat(
            [_places(block, classifiers, normalise=normalise) for block in torch.split(part.values, _ROWS)]
        ).cpu()
        for task, part in features.items()
    }


def joint_places(sizes: Mapping[str, int]) -> dict[str, int]:
    """Where each task's first label stands in the joint space, from the number of labels of every task in order."""
    return dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))


def joint_labels(features: Mapping[str, Features], classifiers: Mapping[str, Classifier]) -> dict[str, torch.Tensor]:
    """Per task of `features`, the true places in the joint label space."""
    _known(features, classifiers)
    first = joint_places({task: len(classifier.labels) for task, classifier in classifiers.items()})
    found = {}
    for task, part in features.items():
        if part.labels is None:
            raise RecipeError(f"the joint accuracy needs labels of the scored inputs, but {task!r} has none")
        found[task] = part.labels + first[task]
    return found


def joint_accuracy(
    features: Mapping[str, Features], classifiers: Mapping[str, Classifier], *, normalise: bool = False
) -> dict[str, float]:
    """Per task, the share of inputs for which both task and class are right."""
    labels = joint_labels(features, classifiers)
    predicted = joint_predictions(features, classifiers, normalise=normalise)
    return {task: accuracy(predicted[task], labels[task]) for task in features}


def _places(block: torch.Tensor, classifiers: Mapping[str, Classifier], *, normalise: bool) -> torch.Tensor:
    logits = [logits_of(classifier, block).float() for classifier in classifiers.values()]
    return predictions(torch.cat([torch.log_softmax(part, 1) for part in logits] if normalise else logits, 1))


def _known(features: Mapping[str, Features], classifiers: Mapping[str, Classifier]) -> None:
    lost = [task for task in features if task not in classifiers]
    if lost or not features:
        raise IncompatibleError(
            f"there is no classifier for {some(lost)}" if lost else "the joint accuracy needs at least one task"
        )
