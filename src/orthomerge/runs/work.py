"""What the artifacts of a run share: the recipe, the run folder, its store, and what a process has opened for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import OutputError, RecipeError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.models.experts import Experts, open_experts
from orthomerge.models.saved import read_model
from orthomerge.runs.blocks import Report
from orthomerge.runs.recipe import Recipe
from orthomerge.runs.store import Store

if TYPE_CHECKING:
    from orthomerge.evaluation.encoded import EncodedTasks
    from orthomerge.models.model import Model
    from orthomerge.runs.blocks import Evaluate

STORE = ".store"


@dataclass(frozen=True, eq=False)
class Work:
    """Another process gets the fields alone and opens everything itself.

    `text`: the recipe as it was written. `count`: how many threads torch has. `progress`: of this process.
    """

    recipe: Recipe
    text: str
    run: Path
    count: int
    progress: Progress = SILENT

    def __getstate__(self) -> dict[str, Any]:
        return {**{each.name: getattr(self, each.name) for each in fields(self)}, "progress": SILENT}

    @property
    def title(self) -> str | None:
        """The heading of the page."""
        return self.recipe.report.title if isinstance(self.recipe.report, Report) else None

    @cached_property
    def store(self) -> Store:
        return Store(self.run / STORE)

    @cached_property
    def experts(self) -> Experts:
        """Base and experts; headers only."""
        return open_experts(self.recipe.opening).check()

    @cached_property
    def section(self) -> Evaluate:
        """The section `evaluate`, without which nothing is scored."""
        if self.recipe.evaluate is None:
            raise RecipeError("the recipe has no section 'evaluate'; add one with the data of the tasks")
        return self.recipe.evaluate

    @cached_property
    def encoded(self) -> EncodedTasks:
        """The tasks of `evaluate` with the experts as teachers."""
        from orthomerge.data.reading import labelled_tasks
        from orthomerge.evaluation.encoded import EncodedTasks
        from orthomerge.models.encoding import Encoding

        labels = {task: head.labels for task, head in self.experts.heads.items()}
        tasks = labelled_tasks(self.section.data, labels, self.experts.family.modality)
        teachers = {task: self.experts.teacher(task) for task in tasks}
        how = Encoding(device=self.section.device, batch=self.section.batch)
        return EncodedTasks(tasks, teachers, how, self.progress)

    def folder(self, key: str) -> Path:
        """The content of a result that is needed."""
        if self.store.get(key) is None:
            raise OutputError(f"{self.store.content(key)} is gone, or not what was written; run the same command again")
        return self.store.content(key)

    def model(self, key: str) -> Model:
        """A model of the store, with the experts that it was made from."""
        model = read_model(self.folder(key))
        return replace(model, origin=replace(model.origin, experts=self.experts))

    @contextmanager
    def threads(self) -> Iterator[None]:
        """As many threads as where the run was started: sums depend on their number."""
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(self.count)
        try:
            yield
        finally:
            torch.set_num_threads(before)
