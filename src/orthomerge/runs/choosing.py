"""Rows of a sweep, one per merge and protocol, and the best row for each budget of inputs.

The best row is chosen on validation inputs and shown with its accuracy on test. Beside it is the best in hindsight,
chosen by the test accuracy that is shown, which is biased upwards. Rows with different budgets (the inputs that a merge
and its scoring used) are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orthomerge.core.errors import some
from orthomerge.core.table import Table, Value, csv_text, markdown_escape
from orthomerge.evaluation.records import Record, Way
from orthomerge.evaluation.tables import Line, lines
from orthomerge.runs.variants import Cell, Variant

_CHOSEN = (
    "Chosen by the mean accuracy on labelled validation inputs, without the test inputs. The best in hindsight is "
    "chosen by the test accuracy that is shown, which is therefore biased upwards."
)
_HINDSIGHT = (
    "Chosen by the test accuracy that is shown, which is therefore biased upwards: expect less on other inputs. With "
    "`choose: val` the best is chosen on validation inputs."
)


@dataclass(frozen=True)
class Failure:
    """A cell that could not be scored. `place`: task and split; empty if the merge itself failed."""

    name: str
    way: Way
    message: str
    place: str = ""

    @property
    def cell(self) -> str:
        return f"{self.name}, {self.way.title} ({self.way.access})"

    @property
    def title(self) -> str:
        return f"{self.cell} on {self.place}" if self.place else self.cell


@dataclass(frozen=True)
class Row:
    """Scores of one merge by one protocol over all seeds. `test` and `val`: None if it failed or was not scored."""

    variant: Variant
    way: Way
    test: Line | None = None
    val: Line | None = None
    failed: str = ""

    @property
    def title(self) -> str:
        return f"{self.variant.name}, {self.way.title}"

    def as_dict(self) -> dict[str, Any]:
        """Return the merge, the protocol and the mean accuracies as plain data."""
        val, test = (None if line is None else round(line.mean, 3) for line in (self.val, self.test))
        name, way = self.variant.name, self.way
        return {"merge": name, "read": way.title, "access": way.access, "val": val, "test": test}

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
        """Return both rows as plain data."""
        chosen = None if self.chosen is None else self.chosen.as_dict()
        return {"budget": self.budget, "chosen": chosen, "hindsight": self.hindsight.as_dict()}


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
    groups: dict[str, list[Failure]] = {}
    for failure in failures:
        groups.setdefault(" ".join(failure.message.split()), []).append(failure)
    reasons = []
    for message, group in groups.items():
        places = ", ".join(dict.fromkeys(failure.place for failure in group if failure.place))
        cells = some(dict.fromkeys(failure.cell for failure in group))
        reasons.append(f"{cells}{f' on {places}' if places else ''}: {message}")
    return reasons


def sweep_csv(rows: Sequence[Row], best: Sequence[Best], tasks: Sequence[str]) -> str:
    """Format every row as CSV; the column `best` names the split on which a row is the best."""
    chosen, hindsight = [item.chosen for item in best], [item.hindsight for item in best]
    columns = ("best", "budget", "method", "scale", "merge", "protocol", "access", "shots", "seeds")
    cells = list[tuple[Value, ...]]()
    for row in rows:
        line, way = row.test, row.way
        val = None if row.val is None else row.val.mean
        test: list[float | None] = [None] * (4 + len(tasks))
        if line is not None:
            test = [line.mean, line.low, line.high, line.spread, *(line.values.get(task) for task in tasks)]
        cells.append(
            (
                " and ".join(name for name, picks in (("val", chosen), ("hindsight", hindsight)) if row in picks),
                row.budget,
                row.variant.method,
                row.variant.parameters.get("scale", ""),
                row.variant.name,
                way.title,
                way.access,
                "" if way.support is None else "all" if way.shots is None else way.shots,
                "" if line is None else line.seeds,
                *("" if value is None else f"{value:.3f}" for value in (val, *test)),
                row.failed,
            )
        )
    return csv_text((*columns, "val", "test", "low", "high", "sd", *tasks, "failed"), cells)


def sweep_markdown(
    rows: Sequence[Row], best: Sequence[Best], failures: Sequence[Failure], references: Mapping[str, float]
) -> str:
    """Format the best per budget, all rows and the failures as Markdown."""
    columns = ("budget", "merge", "protocol", "", "val", "test", "sd", "seeds")
    tables = (best_table(best, references), Table.of("All cells", columns, map(_cells, rows), left=4))
    parts = [table.markdown() for table in tables]
    if failures:
        parts.append("\n".join(("### Failed", "", *(f"- {markdown_escape(line)}" for line in failure_lines(failures)))))
    return "\n\n".join(parts) + "\n"


def best_table(best: Sequence[Best], references: Mapping[str, float]) -> Table:
    """Make the table of the best row per budget. `references`: mean accuracies of base and experts, for the note."""
    scores = ", ".join(f"{name} {value:.1f}" for name, value in references.items())
    comparison = f" For comparison, mean test accuracy with the original heads: {scores}." if scores else ""
    if not any(item.chosen for item in best):
        rows = [(item.budget, *_names(item.hindsight), *_test(item.hindsight)) for item in best]
        names = ("budget", "merge", "protocol", "test", "95 %")
        title, note = "Best in hindsight for each budget of inputs", _HINDSIGHT if best else "No cell was scored."
        return Table.of(title, names, rows, left=3, wrap=names[:3], note=note + comparison)
    cells = list[tuple[str, ...]]()
    for item in best:
        hindsight = "the same" if item.chosen is item.hindsight else item.hindsight.title
        chosen = ("none was scored on val", "") if item.chosen is None else _names(item.chosen)
        numbers = ("", "", "") if item.chosen is None else (_mean(item.chosen.val), *_test(item.chosen))
        cells.append((item.budget, *chosen, hindsight, *numbers, _mean(item.hindsight.test)))
    columns = ("budget", "merge", "protocol", "best in hindsight", "val", "test", "95 %", "hindsight")
    title = "Best for each budget of inputs, chosen on validation"
    return Table.of(title, columns, cells, left=4, wrap=columns[:4], note=_CHOSEN + comparison)


def _cells(row: Row) -> tuple[str, ...]:
    if row.failed or row.test is None:
        return (row.budget, *_names(row), "failed" if row.failed else "", "", "", "", "")
    spread = "" if row.test.spread is None else f"{row.test.spread:.1f}"
    return (row.budget, *_names(row), "", _mean(row.val), _mean(row.test), spread, str(row.test.seeds))


def _names(row: Row) -> tuple[str, str]:
    return row.variant.name, row.way.title


def _test(row: Row) -> tuple[str, str]:
    return _mean(row.test), "" if row.test is None else f"{row.test.low:.1f}-{row.test.high:.1f}"


def _value(line: Line | None) -> float:
    return -1.0 if line is None else line.mean


def _mean(line: Line | None) -> str:
    return "" if line is None else f"{line.mean:.1f}"
