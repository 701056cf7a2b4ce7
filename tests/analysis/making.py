"""Two small image tasks with experts whose heads are solved and not trained, on disk; subjects and scores of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from orthomerge import Experts, merge
from orthomerge.api.open import open as open_experts
from orthomerge.data.task import Examples, Split, Task
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.evaluate import Scored, Subject, evaluate
from orthomerge.evaluation.protocols import EvaluationProtocol
from orthomerge.models.encoding import Encoding
from orthomerge.models.features import FeatureCache
from orthomerge.models.processing import PixelProcessor
from orthomerge.models.skeleton import quiet

PROCESSOR = PixelProcessor(size=8, channels=1)
COUNTS: dict[Split, int] = {"train": 45, "val": 32, "test": 37}  # the last batch is never full
LABELS = {"bright": ("dark", "grey", "light"), "where": ("top", "middle", "bottom")}
_SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 8,
    "patch_size": 4, "num_channels": 1, "initializer_range": 0.2,
}  # fmt: skip
CHEAP: dict[str, Any] = {"epochs": 2}
CURRENT = EvaluationProtocol("current")
PROTOCOLS = (
    CURRENT,
    EvaluationProtocol("knn", shots=2, seeds=2),
    EvaluationProtocol("aligned-c", CHEAP, shots=0.5, seeds=2),
    EvaluationProtocol("aligned-c", CHEAP),
    EvaluationProtocol("probe", {"steps": 5}),
    EvaluationProtocol("knn", shots=3, access="transductive"),
    EvaluationProtocol("aligned-c", CHEAP, access="transductive"),
)


def task_with(task: Task, split: str, part: Examples) -> Task:
    """A task with another part as one of its splits."""
    return replace(task, splits={**task.splits, split: part})


@dataclass(frozen=True)
class Toy:
    """A base and an expert per task in `folder`; features are kept there too."""

    folder: Path
    tasks: dict[str, Task]

    @cached_property
    def experts(self) -> Experts:
        return open_experts({task: self.folder / task for task in self.tasks}, base=self.folder / "base")

    @property
    def encoding(self) -> Encoding:
        return Encoding(FeatureCache(self.folder / "features"), "cpu", batch=8, processor=PROCESSOR)

    def encoded(self, *, how: Encoding | None = None, tasks: Any = None, teachers: Any = None) -> EncodedTasks:
        experts = self.experts.sources if teachers is None else teachers
        return EncodedTasks(self.tasks if tasks is None else tasks, experts, how or self.encoding)

    def alone(self) -> Subject:
        """The experts."""
        return Subject("expert", self.experts.sources)

    def average(self, **more: Any) -> Subject:
        return replace(Subject.of(merge(self.experts, method="average"), self.tasks), **more)

    def total(self) -> Subject:
        return Subject.of(merge(self.experts, method="task_arithmetic", scale=1.0), self.tasks)

    def scored(self, subjects: Sequence[Subject], protocols: Any = (CURRENT,), **more: Any) -> list[Scored]:
        return list(evaluate(subjects, protocols, self.encoded(**more)))

    def without_labels(self, split: Split) -> dict[str, Task]:
        return {name: task_with(task, split, task[split].unlabelled()) for name, task in self.tasks.items()}

    def with_wrong_labels(self, name: str, split: Split) -> dict[str, Task]:
        """All labels of one split of a task moved on by one class."""
        task, part = self.tasks[name], self.tasks[name][split]
        assert part.labels is not None
        wrong = replace(part, labels=(part.labels + 1) % len(task.labels))
        return {**self.tasks, name: task_with(task, split, wrong)}


def make_tasks() -> dict[str, Task]:
    random = np.random.default_rng(0)
    tasks = {}
    for name, labels in LABELS.items():
        splits: dict[str, Examples] = {}
        for split, count in COUNTS.items():
            truth = random.permutation(np.arange(count) % 3)
            images = random.integers(0, 120, (count, 8, 8))
            for place, label in enumerate(truth):
                if name == "bright":
                    images[place] += 60 * label
                else:
                    images[place, 3 * label : 3 * label + 3] += 110
            splits[split] = Examples(list(images.clip(0, 255).astype(np.uint8)), truth.astype(np.int64), split)
        tasks[name] = Task(name, labels, "image", splits)
    return tasks


def make_toy(folder: Path) -> Toy:
    tasks = make_tasks()
    with quiet():
        from transformers import ViTConfig, ViTForImageClassification, ViTModel

        torch.manual_seed(0)
        base = ViTModel(ViTConfig(**_SIZES), add_pooling_layer=False)
        base.save_pretrained(folder / "base")
        for name, task in tasks.items():
            expert = ViTForImageClassification(ViTConfig(**_SIZES, id2label=dict(enumerate(task.labels)))).eval()
            expert.vit.load_state_dict({key: t + 0.15 * torch.randn_like(t) for key, t in base.state_dict().items()})
            solve_head(expert, task["train"])
            expert.save_pretrained(folder / name)
    return Toy(folder, tasks)


def solve_head(expert: Any, train: Examples) -> None:
    """Set the head to the ridge regression of one-hot labels."""
    assert train.labels is not None
    with torch.no_grad():
        features = expert.vit(**PROCESSOR(train.inputs)).last_hidden_state[:, 0].double()
        inputs = torch.cat([features, torch.ones(len(train), 1)], 1)
        target = 6.0 * torch.eye(3, dtype=torch.float64)[torch.tensor(train.labels)]
        solved = torch.linalg.solve(inputs.T @ inputs + 0.1 * torch.eye(17), inputs.T @ target).T.float()
        expert.classifier.weight.copy_(solved[:, :-1])
        expert.classifier.bias.copy_(solved[:, -1])


def only(scores: Sequence[Scored], **wanted: Any) -> list[Scored]:
    """Those whose records have these values."""
    return [item for item in scores if all(getattr(item.record, key) == value for key, value in wanted.items())]


def same_predictions(one: Scored, other: Scored) -> bool:
    return np.array_equal(one.predictions.predicted, other.predictions.predicted)
