"""Several fitted merges of a suite, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orthomerge.evaluation.evaluate import Subject
    from orthomerge.suites.suite import Say, Suite

__all__ = ["Fitting", "fit_all"]


@dataclass(frozen=True)
class Fitting:
    """A fitted method, its options, and what tables call it (its own name unless given)."""

    method: str
    parameters: dict[str, Any] = field(default_factory=dict)
    name: str | None = None


def fit_all(suite: Suite, fittings: Sequence[Fitting], *, device: str, say: Say) -> list[Subject]:
    """The merges in the order of `fittings`."""
    subjects = []
    for fitting in fittings:
        subjects.append(suite.fitted(fitting.method, fitting.parameters, device=device, name=fitting.name))
        say(f"fitted: {subjects[-1].name}")
    return subjects
