"""One label space for all tasks and no word about which task an input belongs to: is the merged model *one* model?

The joint benchmark of KnOTS (Stoica et al. 2024, arXiv 2410.19735). Every task's classifier reads the same inputs in
its own way (pooling, maximum length); their logits stand side by side, [n, C_1 + ... + C_T], and a prediction counts
only if it names the right task and the right class. Logits are compared as they are.
Differs from the paper: the same label in two tasks ("seven" in MNIST and SVHN) is two classes here.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from orthomerge.evaluation.metrics import predictions
from orthomerge.models.heads import head_of, logits_of

if TYPE_CHECKING:
    from orthomerge.evaluation.encoded import EncodedTasks
    from orthomerge.models.model import Model


def joint_predictions(encoded: EncodedTasks, models: Mapping[str, Model]) -> dict[str, torch.Tensor]:
    """Per task, the predicted place of every test input in the joint label space: tasks in the order of `models`."""
    classifiers = [encoded.classifier(model, task) for task, model in models.items()]
    predicted = {}
    for task, model in models.items():
        logits = [
            logits_of(classifier, encoded.features(model, task, "test", reader=head_of(classifier)).values).float()
            for classifier in classifiers
        ]
        predicted[task] = predictions(torch.cat(logits, 1)).cpu()
    return predicted


def joint_labels(encoded: EncodedTasks, models: Mapping[str, Model]) -> dict[str, torch.Tensor]:
    """Per task, the true places of its test inputs in the joint label space."""
    starts = accumulate((len(encoded.tasks[task].labels) for task in models), initial=0)
    return {task: encoded.labels(task, "test") + start for task, start in zip(models, starts, strict=False)}
