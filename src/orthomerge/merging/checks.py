"""Whether experts can be merged by a method, told before any work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from orthomerge.core.errors import OrthomergeError, RecipeError
from orthomerge.merging.methods import methods
from orthomerge.models.problems import Problem

if TYPE_CHECKING:
    from orthomerge.models.experts import Experts


def merge_problems(experts: Experts, method: str, *, device: str = "cpu") -> Iterator[Problem]:
    """What keeps a method from merging experts that fit together."""
    row = methods().get(method)
    if row is None:  # an object that somebody made
        return
    if row.base and not experts.has_base:
        what = f"{method} needs the model that the experts were fine-tuned from"
        yield Problem("base", what, "give it as 'base'", RecipeError)
    if row.fitted and experts.found is not None and not experts.found.family.encoder_class:
        what = f"inputs cannot be encoded here by {experts.found.family.title}, which is built elsewhere"
        yield Problem("fit", what, "use a method that needs no inputs", RecipeError)
    if device == "cpu" or row.fitted:
        return
    if not row.matrices:
        those = ", ".join(name for name, each in methods().items() if each.matrices)
        what = f"'device' is for methods that decompose matrices ({those}); {method} is as fast as the disk on a CPU"
        yield Problem("device", what, "leave it out", RecipeError)
        return
    from orthomerge.models.extract import device_of

    try:
        device_of(device)
    except OrthomergeError as error:
        yield Problem.of("device", error)


def check_merge(experts: Experts, method: str, *, device: str = "cpu", vector: str | None = None) -> None:
    """Refuse what cannot be merged, and experts whose task vectors mean nothing."""
    from orthomerge.merging.kinship import check_kinship
    from orthomerge.merging.merged import check_tied, task_vectors

    problems = (*experts.problems, *merge_problems(experts, method, device=device))
    if problems:
        experts.with_problems(problems).check()
    check_tied(experts)
    if vector is None:
        check_kinship(experts, task_vectors(experts))
