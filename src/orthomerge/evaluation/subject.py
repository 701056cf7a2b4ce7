"""What is scored under one name: a model, or a model per task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orthomerge.data.task import Access
    from orthomerge.models.model import Model


@dataclass(frozen=True, eq=False)
class Subject:
    """`models`: by task; a merge is one model for all tasks, the experts are one model per task.

    `parameters`: options of the method that made it. `access`: which inputs its making saw.
    """

    name: str
    models: Mapping[str, Model]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    access: Access = "data-free"

    @classmethod
    def of(cls, model: Model, tasks: Iterable[str], *, name: str | None = None) -> Subject:
        """A model under the name of its method, with that of its aligner if its heads were aligned."""
        parameters = model.origin.facts["method"]["parameters"]
        return cls(name or model.title, dict.fromkeys(tasks, model), parameters, access=model.origin.access)


def told_apart(subjects: Sequence[Subject], folders: Sequence[str] = ()) -> list[Subject]:
    """Models made by the same method are called after their folders, or else after their method's options, too."""
    names = [subject.name for subject in subjects]
    return [
        replace(subject, name=f"{subject.name} ({folder or method_label(subject.name, subject.parameters)})")
        if names.count(subject.name) > 1
        else subject
        for subject, folder in zip(subjects, folders or [""] * len(subjects), strict=True)
    ]


def method_label(method: str, parameters: Mapping[str, Any]) -> str:
    """A method with its options, as in the name of a file."""
    options = "".join(f"-{key}={value}" for key, value in sorted(parameters.items()) if value is not None)
    return f"{method}{options}".replace("/", "_")
