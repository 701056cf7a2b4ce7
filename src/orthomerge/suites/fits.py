"""Several fitted merges of a suite, one after the other or side by side in processes: the same either way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from orthomerge.suites.processes import side_by_side

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


def fit_all(suite: Suite, fittings: Sequence[Fitting], *, workers: int, device: str, say: Say) -> list[Subject]:
    """The merges in the order of `fittings`; with several workers each has one thread, and the first ones begin."""
    calls = [partial(_fitted, suite, fitting, device) for fitting in fittings]
    found: dict[int, Subject] = {}
    for number, made in side_by_side(calls, workers=workers, threads=1) if workers > 1 else _in_turn(calls):
        found[number] = made
        say(f"fitted: {made.name}")
    return [found[number] for number in range(len(fittings))]


def _in_turn(calls: Sequence[partial[Subject]]) -> list[tuple[int, Subject]]:
    return [(number, call()) for number, call in enumerate(calls)]


def _fitted(suite: Suite, fitting: Fitting, device: str) -> Subject:
    return suite.fitted(fitting.method, fitting.parameters, device=device, name=fitting.name)
