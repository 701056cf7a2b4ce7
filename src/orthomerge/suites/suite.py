"""A suite: base, experts and tasks under one name, in one folder, built once and found again.

FOLDER/base/            the pre-trained encoder
FOLDER/experts/TASK/    fine-tuned classifiers, in stock format
FOLDER/mtl/TASK/        one encoder trained on all tasks at once, with each task's head
FOLDER/models/NAME/     whatever is evaluated, as outputs of `orthomerge merge`
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.checkpoints.publish import MANIFEST
from orthomerge.errors import RecipeError, nearest
from orthomerge.evaluation.evaluate import Subject
from orthomerge.pipeline import merge
from orthomerge.recipe import Expert, Recipe

if TYPE_CHECKING:
    from orthomerge.data.processing import Processor
    from orthomerge.data.task import Task

__all__ = ["Say", "Suite", "suite_root"]

Say = Callable[[str], None]


def suite_root() -> Path:
    """Where suites are kept: `suites` in $ORTHOMERGE_CACHE, or in `~/.cache/orthomerge`."""
    return Path(os.environ.get("ORTHOMERGE_CACHE") or "~/.cache/orthomerge").expanduser() / "suites"


@dataclass(frozen=True)
class Suite:
    """A built suite. `linearised` experts are evaluated as the linear models they are.

    An expert is a folder in stock format, or an `Expert` that says what its file does not; the base then says the rest.
    `options` are those of every recipe, for example `pooling`.
    """

    name: str
    folder: Path
    tasks: Mapping[str, Task]
    processor: Processor
    experts: Mapping[str, Path | Expert]
    mtl: Mapping[str, Path] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def base(self) -> Path:
        return self.folder / "base"

    def recipe(self, method: str, parameters: Mapping[str, Any] | None = None, **more: Any) -> Recipe:
        """The merge of all experts by a method."""
        return Recipe(
            experts={task: _plain(expert) for task, expert in self.experts.items()},
            base=str(self.base),
            method=method,
            parameters=dict(parameters or {}),
            **{**self.options, **more},
        )

    def merged(self, method: str, parameters: Mapping[str, Any] | None = None) -> Subject:
        """The merge of all experts, made now unless it was before."""
        given = dict(parameters or {})
        options = "".join(f"-{key}={value}" for key, value in sorted(given.items()))
        out = self._made(f"{method}{options}".replace("/", "_"), self.recipe(method, given))
        return Subject(method, dict.fromkeys(self.tasks, out), given)

    def references(self) -> dict[str, Subject]:
        """What every table starts with: the base under the experts' heads, the experts, and multi-task training."""
        untuned = self._made("base", self.recipe("task_arithmetic", {"scale": 0.0}))
        found = {
            "base": Subject("base", dict.fromkeys(self.tasks, untuned)),
            "expert": Subject("expert", self.alone("expert", self.experts)),
        }
        if self.mtl:
            found["mtl"] = Subject("mtl", self.alone("mtl", self.mtl), access="data-free")
        return found

    def alone(self, kind: str, classifiers: Mapping[str, Path | Expert]) -> dict[str, Path]:
        """Single classifiers as outputs, weights unchanged: the average of one."""
        return {
            task: self._made(
                f"{kind}-{task}",
                Recipe(
                    experts={task: _plain(given)},
                    base=str(self.base) if isinstance(given, Expert) else None,
                    method="average",
                    **self.options,
                ),
            )
            for task, given in classifiers.items()
        }

    def task(self, name: str) -> Task:
        if name not in self.tasks:
            raise RecipeError(f"suite {self.name!r} has no task {name!r}; {nearest(name, self.tasks)}")
        return self.tasks[name]

    def _made(self, name: str, recipe: Recipe) -> Path:
        out = self.folder / "models" / name
        if not (out / MANIFEST).is_file():
            merge(recipe, out=out)
        return out


def _plain(expert: Path | Expert) -> Expert | str:
    return expert if isinstance(expert, Expert) else str(expert)
