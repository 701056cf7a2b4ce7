"""Where subjects are measured: the tasks, how their inputs are read, and the features made of them so far.

Features are made once for each encoder, task and split, and cached on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from orthomerge.data.task import Examples, Split, Task
from orthomerge.errors import IncompatibleError, RecipeError
from orthomerge.evaluation.metrics import logits_of
from orthomerge.features.cache import FeatureCache, FeatureKey, weights_digest
from orthomerge.features.extract import Precision, device_of, extract
from orthomerge.features.features import Features
from orthomerge.heads import Head
from orthomerge.merged import Merged, load, load_classifier, read_manifest

if TYPE_CHECKING:
    from orthomerge.alignment.aligner import Extra
    from orthomerge.data.processing import Processor

__all__ = ["Bench"]


@dataclass(frozen=True)
class Bench:
    """Tasks, how their inputs are read, and where features are kept. `teachers`: each task's expert."""

    tasks: Mapping[str, Task]
    processor: Processor
    teachers: Mapping[str, Path] = field(default_factory=dict)
    cache: FeatureCache = field(default_factory=FeatureCache)
    device: str = "auto"
    autocast: Precision = "float32"
    batch: int = 64
    progress: Callable[[str], None] = lambda text: None

    @cached_property
    def _loaded(self) -> dict[str, Merged]:
        """The encoder that was used last."""
        return {}

    @cached_property
    def _features(self) -> dict[tuple[Path, str, Split], Features]:
        """What is in memory of the subject that is being scored."""
        return {}

    @cached_property
    def _logits(self) -> dict[tuple[str, Split], torch.Tensor]:
        """The experts' logits, which every subject needs."""
        return {}

    def forget(self) -> None:
        """Let go of features in memory; they are in the cache."""
        self._features.clear()

    def head(self, model: Path, task: str) -> Head:
        """The head of a task in an output folder; of a classifier that is more than a head, the head in it."""
        found = self.classifier(model, task)
        return found if isinstance(found, Head) else found.head

    def classifier(self, model: Path, task: str) -> Head | Extra:
        """What reads a task in an output folder; its labels must be the task's, in the same order."""
        found = load_classifier(model / "heads" / task)
        labels = self.tasks[task].labels
        numbered = tuple(f"LABEL_{number}" for number in range(len(labels)))
        if found.labels not in (labels, numbered):
            raise IncompatibleError(
                f"the head of {task!r} in {model} has other labels than the data, or another order; "
                "match the data's labels to the expert's first (orthomerge.data.reading.match_labels)"
            )
        return found

    def features(self, model: Path, task: str, split: Split) -> Features:
        """Features of one split under one encoder, from the cache if they were ever made."""
        if (model, task, split) in self._features:
            return self._features[model, task, split]
        examples = self.tasks[task][split]
        found = self.cache.get_or_make(self.key(model, task, split), lambda: self._extract(model, task, examples))
        self._features[model, task, split] = found
        return found

    def key(self, model: Path, task: str, split: Split) -> FeatureKey:
        """By what the features of one split under one encoder are found in the cache."""
        manifest = read_manifest(model)
        return FeatureKey.of(
            self.tasks[task][split],
            self.processor,
            weights=weights_digest(model),
            family=manifest["family"],
            pooling=manifest["pooling"],
            task=task,
            autocast=self.autocast,
        )

    def teacher_of(self, task: str) -> Path:
        """The expert of a task."""
        if task not in self.teachers:
            raise RecipeError(
                f"the expert of {task!r} is needed as teacher and was not given; give --expert {task}=PATH"
            )
        return self.teachers[task]

    def teacher(self, task: str, split: Split) -> torch.Tensor:
        """The expert's logits on one split of its task."""
        expert = self.teacher_of(task)
        if (task, split) not in self._logits:
            self._logits[task, split] = logits_of(self.head(expert, task), self.features(expert, task, split).values)
        return self._logits[task, split]

    def _extract(self, model: Path, task: str, examples: Examples) -> Features:
        self.progress(f"encoding {task}/{examples.split} with {model.name} ({len(examples)} inputs)")
        content = weights_digest(model)
        if content not in self._loaded:
            self._loaded.clear()  # one encoder at a time
            self._loaded[content] = load(model)
        return self.encode(self._loaded[content], task, examples)

    def encode(self, merged: Merged, task: str, examples: Examples) -> Features:
        """Features of some examples, made now; what passes leave in a GPU's allocator goes back to other processes."""
        found = extract(
            merged.encoder,
            merged.family,
            merged.pooling,
            examples,
            self.processor,
            task=task,
            batch=self.batch,
            device=self.device,
            autocast=self.autocast,
        )
        if device_of(self.device).type != "cpu":
            torch.accelerator.empty_cache()
        return found
