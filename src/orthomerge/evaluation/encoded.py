"""Tasks and the features of their inputs by model, kept in memory while they are needed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from orthomerge.core.errors import IncompatibleError, RecipeError, nearest
from orthomerge.core.progress import SILENT, Progress
from orthomerge.data.task import Split, Task
from orthomerge.evaluation.metrics import Score, counted, predict
from orthomerge.models.encoding import Encoding, encode
from orthomerge.models.features import Features
from orthomerge.models.heads import Extra, Head, head_of
from orthomerge.models.model import Model
from orthomerge.models.model_data import Encoder

_Key = tuple[Encoder, str, Split, str | None, int | None]


@dataclass(frozen=True, eq=False)
class EncodedTasks:
    """Tasks, with labels in the order of the heads, and the expert of each task as its teacher."""

    tasks: Mapping[str, Task]
    teachers: Mapping[str, Model] = field(default_factory=dict)
    how: Encoding = field(default_factory=Encoding)
    progress: Progress = SILENT
    _features: dict[_Key, Features] = field(default_factory=dict, init=False)

    def features(self, model: Model, task: str, split: Split, *, reader: Head | None = None) -> Features:
        """Return features and labels of one split, with the pooling and length of the task's head or of `reader`."""
        head = reader or head_of(self.classifier(model, task))
        key, examples = (model.encoder, task, split, head.pooling, head.max_length), self.tasks[task][split]
        if key not in self._features:
            self.progress.stage(f"encoding {task}/{split} with {model.title} ({len(examples)} inputs)", None)
            self._features[key] = encode(model, examples, task=task, head=head, how=self.how)
        return self._features[key]

    def keep(self, models: Collection[Model]) -> None:
        """Drop the features of all other models from memory; the cache on disk is left unchanged."""
        encoders = {model.encoder for model in models}
        for key in [key for key in self._features if key[0] not in encoders]:
            del self._features[key]

    def labels(self, task: str, split: Split) -> torch.Tensor:
        """Return the labels [n] of one split of a task; a missing task or label is refused."""
        if task not in self.tasks:
            raise RecipeError(f"there is no data for {task!r}; {nearest(task, self.tasks)}")
        labels = self.tasks[task][split].labels
        if labels is None:
            raise RecipeError(f"the {split} split of {task!r} has no labels; accuracy needs them: give labelled data")
        return torch.tensor(labels, dtype=torch.int64)

    def classifier(self, model: Model, task: str) -> Head | Extra:
        """Return a model's head for a task; its labels must be the task's, in the same order."""
        classifier, labels = model.head(task), self.tasks[task].labels
        numbered = tuple(f"LABEL_{number}" for number in range(len(labels)))
        if classifier.labels not in (labels, numbered):
            raise IncompatibleError(
                f"the data of {task!r} must have the labels of its head in {model.title!r}, in the same order; "
                "match the data's labels to the expert's first (orthomerge.data.labels.match_labels)"
            )
        return classifier

    def teacher(self, task: str) -> Model:
        if task not in self.teachers:
            raise RecipeError(f"the expert of {task!r} is needed as teacher; give its path: --expert {task}=PATH")
        return self.teachers[task]

    def predictions(self, model: Model, task: str, split: Split) -> torch.Tensor:
        classifier = self.classifier(model, task)
        return predict(classifier, self.features(model, task, split).values, head_of(classifier).kind)

    def score(self, model: Model, task: str, split: Split) -> Score:
        labels = self.labels(task, split)
        return counted(self.predictions(model, task, split), labels, head_of(model.head(task)).kind)
