"""Rows of a sweep, one per merge and protocol, and the best row for each budget of inputs.

The best row is chosen on validation inputs, and another in hindsight on test, whose accuracy is biased upwards. Rows
with different budgets (the inputs that a merge and its scoring used) are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orthomerge.core.errors import some
from orthomerge.core.table import Table, Value, csv_text, markdown_escape, number, span
from orthomerge.evaluation.records import Record, Way
from orthomerge.evaluation.tables import Line, lines
from orthomerge.runs.variants import Cell, Variant

_NOTE = (
    "A row chosen on val has the best mean accuracy on labelled validation inputs, without the test inputs. A row "
    "chosen on test is the best in hindsight, by the accuracy that is shown, which is therefore biased upwards."
)


@dataclass(frozen=True)
class Failure:
    """A cell that could not be scored. `place`: task and split; empty if the merge itself failed."""

    name: str
    way: Way
    message: str
    place: str = ""

    @property
    def title(self) -> str:
        cell = f"{self.name}, {self.way.title} ({self.way.access})"
        return f"{cell} on {self.place}" if self.place else cell


@dataclass(frozen=True)
class Row:
    """Scores of one merge by one protocol over all seeds. `test` and `val`: None if it failed or was not scored."""

    variant: Variant
    way: Way
    test: Line | None = None
    val: Line | None = None
    failed: str = ""

    @property
    def budget(self) -> str:
        """Inputs that the merge and its scoring used, in words."""
        fit = "the fit's" if self.variant.fitted else ""
        if self.way.support is None:
            return f"{fit} inputs" if fit else "no inputs"
        shots = self.way.shots
        read = "all inputs" if shots is None else f"{shots:g} per class" if shots >= 1 else f"{shots:.0%} of the inputs"
        kind = "" if self.way.access == "inductive" else f" ({self.way.access})"
        return f"{fit} and {read}{kind}" if fit else f"{read}{kind}"


@dataclass(frozen=True)
class Best:
    """Best row of one budget, `chosen` on validation (None if nothing was scored there) and in `hindsight` on test."""

    budget: str
    chosen: Row | None
    hindsight: Row

    def as_dict(self) -> dict[str, Any]:
        """Return merge, protocol and mean accuracies of both rows as plain data."""
        document: dict[str, Any] = {"budget": self.budget, "chosen": None}
        for name, row in (("chosen", self.chosen), ("hindsight", self.hindsight)):
            if row is not None:
                val, test = (None if line is None else round(line.mean, 3) for line in (row.val, row.test))
                way = {"read": row.way.title, "access": row.way.access}
                document[name] = {"merge": row.variant.name, **way, "val": val, "test": test}
        return document


def rows_of(
    cells: Iterable[Cell], records: Sequence[Record], validation: Sequence[Record], failures: Sequence[Failure]
) -> list[Row]:
    """Return one row per merge and protocol, in the order of the cells."""
    test, val = ({(line.method, line.way): line for line in lines(part)} for part in (records, validation))
    failed = {(failure.name, failure.way): failure.message for failure in reversed(failures)}
    rows: dict[tuple[str, Way], Row] = {}
    for cell in cells:
        key = (cell.variant.name, cell.way)
        rows.setdefault(key, Row(cell.variant, cell.way, test.get(key), val.get(key), failed.get(key, "")))
    return list(rows.values())


def best_of(rows: Iterable[Row]) -> list[Best]:
    """Return the best row per budget, the first of equals, without rows that failed on any task."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.test is not None and not row.failed:
            groups.setdefault(row.budget, []).append(row)
    return [
        Best(
            budget,
            max((row for row in group if row.val is not None), key=lambda row: _value(row.val), default=None),
            max(group, key=lambda row: _value(row.test)),
        )
        for budget, group in groups.items()
    ]


def failure_lines(failures: Iterable[Failure]) -> list[str]:
    """Format one line per reason, with the cells that failed for it."""
    groups: dict[str, list[str]] = {}
    for failure in failures:
        groups.setdefault(" ".join(failure.message.split()), []).append(failure.title)
    return [f"{some(titles)}: {message}" for message, titles in groups.items()]


def sweep_csv(rows: Sequence[Row], tasks: Sequence[str]) -> str:
    """Format every row as CSV."""
    columns = ("budget", "method", "scale", "merge", "protocol", "access", "shots", "seeds")
    cells = list[tuple[Value, ...]]()
    for row in rows:
        line, way = row.test, row.way
        values = {} if line is None else line.values
        means = [getattr(line, name, None) for name in ("mean", "low", "high", "spread")]
        numbers = [getattr(row.val, "mean", None), *means, *map(values.get, tasks)]
        cells.append(
            (
                row.budget,
                row.variant.method,
                row.variant.parameters.get("scale"),
                row.variant.name,
                way.title,
                way.access,
                None if way.support is None else way.shots or "all",
                None if line is None else line.seeds,
                *(None if value is None else f"{value:.3f}" for value in numbers),
                row.failed,
            )
        )
    return csv_text((*columns, "val", "test", "low", "high", "sd", *tasks, "failed"), cells)


def sweep_markdown(
    rows: Sequence[Row], best: Sequence[Best], failures: Sequence[Failure], references: Mapping[str, float]
) -> str:
    """Format the best per budget, all rows and the failures as Markdown."""
    columns = ("budget", "merge", "protocol", "", "val", "test", "95 %", "sd", "seeds")
    tables = (best_table(best, references), Table.of("All cells", columns, map(_cells, rows), left=4))
    parts = [table.markdown() for table in tables]
    if failures:
        parts.append("\n".join(("### Failed", "", *(f"- {markdown_escape(line)}" for line in failure_lines(failures)))))
    return "\n\n".join(parts) + "\n"


def best_table(best: Sequence[Best], references: Mapping[str, float]) -> Table:
    """Make the table of the best rows per budget. `references`: mean accuracies of base and experts, for the note."""
    columns = ("budget", "merge", "protocol", "chosen on", "val", "test", "95 %")
    cells = [
        (item.budget, row.variant.name, row.way.title, split, *_numbers(row))
        for item in best
        for split, row in (("val", item.chosen), ("test", item.hindsight))
        if row is not None
    ]
    scores = ", ".join(f"{name} {value:.1f}" for name, value in references.items())
    comparison = f" For comparison, mean test accuracy with the original heads: {scores}." if scores else ""
    note = (_NOTE if best else "No cell was scored.") + comparison
    return Table.of("Best for each budget of inputs", columns, cells, left=4, wrap=columns[:3], note=note)


def _cells(row: Row) -> tuple[Any, ...]:
    names = (row.budget, row.variant.name, row.way.title)
    if row.failed or row.test is None:
        return (*names, "failed" if row.failed else "", *[""] * 5)
    return (*names, "", *_numbers(row), number(row.test.spread), row.test.seeds)


def _numbers(row: Row) -> tuple[Any, ...]:
    val, test = (None if line is None else line.mean for line in (row.val, row.test))
    return number(val), number(test), "" if row.test is None else span(row.test.low, row.test.high)


def _value(line: Line | None) -> float:
    return -1.0 if line is None else line.mean
