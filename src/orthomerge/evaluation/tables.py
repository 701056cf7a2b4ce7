"""Records as tables: a row for each method and protocol, a column for each task, access classes never mixed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from orthomerge.records import Access, Record

__all__ = ["TITLES", "Line", "lines", "markdown"]

TITLES: Mapping[Access, str] = {
    "data-free": "No inputs used",
    "inductive": "Inductive: inputs from train or val, scored on test",
    "cross-fitted": "Cross-fitted: test inputs, never those being scored",
    "transductive": "Transductive: the test inputs themselves, as most papers do",
}


@dataclass(frozen=True)
class Line:
    """One row: accuracies in percent by task, averaged over seeds; `spread` is the deviation of the mean over seeds."""

    method: str
    protocol: str
    shots: int | float | None
    access: Access
    values: dict[str, float]
    mean: float
    worst_seed: float
    spread: float | None
    seeds: int

    @property
    def title(self) -> str:
        shots = "" if self.shots is None else f", {self.shots:g}/class" if self.shots >= 1 else f", {self.shots:.0%}"
        return f"{self.protocol}{shots}"


def lines(records: Iterable[Record]) -> list[Line]:
    """Rows in the order in which they were measured."""
    groups: dict[tuple[str, str, int | float | None, Access], list[Record]] = {}
    for record in records:
        if record.metric == "accuracy":
            groups.setdefault((record.method, record.protocol, record.shots, record.access), []).append(record)
    found = []
    for (method, protocol, shots, access), group in groups.items():
        by_task: dict[str, list[float]] = {}
        by_seed: dict[int, list[float]] = {}
        for record in group:
            by_task.setdefault(record.task, []).append(100 * record.value)
            by_seed.setdefault(record.seed, []).append(100 * record.value)
        means = [mean(values) for values in by_seed.values()]
        values = {task: mean(numbers) for task, numbers in by_task.items()}
        spread = stdev(means) if len(means) > 1 else None
        found.append(
            Line(method, protocol, shots, access, values, mean(values.values()), min(means), spread, len(means))
        )
    return found


def markdown(records: Sequence[Record]) -> str:
    """One table for each access class that occurs, data-free and inductive first."""
    rows = lines(records)
    tasks = list(dict.fromkeys(record.task for record in records))
    parts = []
    for access in TITLES:
        chosen = [row for row in rows if row.access == access]
        if not chosen:
            continue
        head = "| method | protocol | " + " | ".join(tasks) + " | mean |"
        rule = "|---|---|" + "---:|" * (len(tasks) + 1)
        body = [
            f"| {row.method} | {row.title} | "
            + " | ".join(f"{row.values[task]:.1f}" if task in row.values else "" for task in tasks)
            + f" | **{row.mean:.1f}**{'' if row.spread is None else f' ± {row.spread:.1f} ({row.seeds} seeds)'} |"
            for row in chosen
        ]
        parts.append("\n".join((f"### {TITLES[access]}", "", head, rule, *body)))
    return "\n\n".join(parts)
