"""Estimates and lists of tasks in words."""

from __future__ import annotations

from orthomerge.analysis.recovery import Estimate


def minus(estimate: Estimate) -> Estimate:
    """The other way round."""
    return Estimate(-estimate.value, -estimate.high, -estimate.low)


def points(estimate: Estimate) -> str:
    """Points of accuracy with their interval."""
    return f"{_plain(estimate.value, 1)} points ({span(estimate)})"


def span(estimate: Estimate, *, factor: float = 1) -> str:
    """An interval; in percent with `factor` 100."""
    digits = 1 if factor == 1 else 0
    return f"{_plain(factor * estimate.low, digits)} to {_plain(factor * estimate.high, digits)}"


def told(name: str, estimate: Estimate, *, factor: float = 1) -> dict[str, float]:
    """An estimate as numbers of a finding."""
    return {
        name: factor * estimate.value,
        f"{name}, low": factor * estimate.low,
        f"{name}, high": factor * estimate.high,
    }


def listed(tasks: list[str]) -> str:
    """Names of tasks, three at the most."""
    shown = [repr(task) for task in tasks[:3]]
    rest = f" and {len(tasks) - 3} more" if len(tasks) > 3 else ""
    return (", ".join(shown) + rest) if rest or len(shown) < 2 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _plain(value: float, digits: int) -> str:
    """Rounded, and never -0."""
    return f"{round(value, digits) + 0.0:.{digits}f}"
