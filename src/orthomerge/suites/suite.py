"""A suite: base, experts and tasks under one name, in one folder, built once and found again.

FOLDER/base/            the pre-trained encoder
FOLDER/experts/TASK/    fine-tuned classifiers, in stock format
FOLDER/mtl/TASK/        one encoder trained on all tasks at once, with each task's head
FOLDER/features/        what encoders made of inputs, by content

Its models are merged in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.evaluation.evaluate import Subject
from orthomerge.merging.merge import merge_opened
from orthomerge.models.encoding import Encoding
from orthomerge.models.experts import Experts, open_experts
from orthomerge.models.features import FeatureCache
from orthomerge.models.opening import Expert, opening_of

if TYPE_CHECKING:
    from orthomerge.data.task import Task
    from orthomerge.models.model import Model
    from orthomerge.models.processing import Processor


Say = Callable[[str], None]


def suite_root() -> Path:
    """Where suites are kept: `suites` in $ORTHOMERGE_CACHE, or in `~/.cache/orthomerge`."""
    return Path(os.environ.get("ORTHOMERGE_CACHE") or "~/.cache/orthomerge").expanduser() / "suites"


@dataclass(frozen=True)
class Suite:
    """A built suite.

    `paths`: of the experts: folders in stock format, or an `Expert` that says what its file does not; the base then
    says the rest. `options`: how they are opened, as of `Opening`, for example `pooling`.
    """

    name: str
    folder: Path
    tasks: Mapping[str, Task]
    processor: Processor
    paths: Mapping[str, Path | Expert] = field(default_factory=dict)
    mtl: Mapping[str, Path] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def base(self) -> Path:
        return self.folder / "base"

    def experts(self) -> Experts:
        """The experts, opened with their base."""
        return self._experts

    def merged(self, method: str, options: Mapping[str, Any] | None = None) -> Model:
        """The merge of all experts by a method; nothing is computed yet."""
        return merge_opened(self.experts(), method, options or {})

    def references(self) -> dict[str, Subject]:
        """What every table starts with: the base under the experts' heads, the experts, and multi-task training."""
        experts = self.experts()
        references = {
            "base": dict.fromkeys(self.tasks, experts.base.with_heads(experts.heads)),
            "expert": {task: experts.teacher(task) for task in self.tasks},
        }
        if self.mtl:
            references["mtl"] = self.alone(self.mtl)
        return {name: Subject(name, models) for name, models in references.items()}

    def alone(self, paths: Mapping[str, Path]) -> dict[str, Model]:
        """Other classifiers of the suite's tasks, each as a model of its own."""
        return open_experts(opening_of(paths, **self.options)[0]).check().sources

    def encoding(self, device: str = "auto", *, batch: int = 64) -> Encoding:
        """How the suite's inputs are encoded."""
        return Encoding(FeatureCache(self.folder / "features"), device, batch=batch, processor=self.processor)

    @cached_property
    def _experts(self) -> Experts:
        return open_experts(opening_of(self.paths, base=self.base, **self.options)[0]).check()
