"""A model beside its experts: the tasks they are compared on, split and encoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from orthomerge.analysis.embedding import chosen_inputs
from orthomerge.core.errors import RecipeError, nearest
from orthomerge.core.progress import Progress
from orthomerge.data.task import Examples, pick
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.models.features import FeaturePair
from orthomerge.models.heads import head_of

if TYPE_CHECKING:
    from orthomerge.analysis.looks import Looks
    from orthomerge.data.task import Split, Task
    from orthomerge.models.encoding import Encoding
    from orthomerge.models.experts import Experts
    from orthomerge.models.heads import Head
    from orthomerge.models.model import Model


@dataclass(frozen=True, eq=False)
class Compared:
    """A model beside its experts on some tasks; `left_out`: what could not be measured, and why."""

    model: Model
    experts: Experts
    encoded: EncodedTasks
    looks: Looks
    progress: Progress
    left_out: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: Model,
        experts: Experts,
        tasks: Mapping[str, Task],
        *,
        looks: Looks,
        how: Encoding,
        progress: Progress,
    ) -> Compared:
        """Check the tasks, and encode all their inputs by the model before any expert is run."""
        if not tasks:
            raise RecipeError("there is no task to compare the model and its experts on: give the data of at least one")
        for task in tasks:
            model.head(task)
            if task not in experts.tasks:
                raise RecipeError(
                    f"the expert of {task!r} is needed and not among those given; {nearest(task, experts.tasks)}"
                )
        if looks.limit is not None:
            tasks = {name: _limited(task, looks.limit, looks.seed) for name, task in tasks.items()}
        splits = {name: fitting_split(task) for name, task in tasks.items()}
        encoded = EncodedTasks(tasks, {task: experts.teacher(task) for task in tasks}, how, progress)
        for task, split in splits.items():
            encoded.features(model, task, split)
            encoded.features(model, task, "test")
        return cls(model, experts, encoded, looks, progress)

    @property
    def tasks(self) -> Mapping[str, Task]:
        return self.encoded.tasks

    def expert_head(self, task: str) -> Head:
        """The expert's own head."""
        return head_of(self.encoded.classifier(self.encoded.teacher(task), task))

    def pair(self, task: str, split: Split) -> FeaturePair:
        """Features of one split by the model and by the expert."""
        encoded = self.encoded
        return FeaturePair(
            encoded.features(self.model, task, split), encoded.features(encoded.teacher(task), task, split)
        )


def fitting_split(task: Task) -> Split:
    """What maps and heads are fitted on: never what they are measured on."""
    splits: tuple[Split, ...] = ("train", "val")
    for split in splits:
        if len(task.splits.get(split, ())):
            return split
    raise RecipeError(
        f"a diagnosis fits maps to inputs that it does not measure them on, and {task.name!r} has a test split alone; "
        "give a train or val split too (no labels are needed)"
    )


def _limited(task: Task, most: int, seed: int) -> Task:
    """The task with fewer inputs to fit to, classes in their shares where they are known."""
    split = fitting_split(task)
    examples = task[split]
    places = chosen_inputs(examples.labels, len(examples), most=most, seed=seed)
    labels = None if examples.labels is None else examples.labels[places]
    return replace(task, splits={**task.splits, split: Examples(pick(examples.inputs, places), labels, split)})
