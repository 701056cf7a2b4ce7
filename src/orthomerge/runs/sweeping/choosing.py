"""The cells of a sweep as rows, and the best of them for each budget of inputs.

The best is chosen on validation inputs and told with its accuracy on test, which had no part in the choice. Beside it
stands the best in hindsight: chosen by the very number that is shown, and therefore flattered. Cells with different
budgets (how many inputs a merge and its reading saw, and which) do not compete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from orthomerge.core.errors import some
from orthomerge.core.table import Table, Value, csv_text, markdown_escape
from orthomerge.evaluation.records import Record, Way
from orthomerge.evaluation.tables import Line, lines
from orthomerge.runs.sweeping.cells import Cell, Variant


@dataclass(frozen=True)
class Failure:
    """A question about a task that could not be answered. `lasting`: it would fail again, by its own numbers."""

    name: str
    task: str
    split: str
    way: Way
    message: str
    lasting: bool = True

    @property
    def cell(self) -> str:
        return f"{self.name}, {self.way.title} ({self.way.access})"

    @property
    def place(self) -> str:
        return f"{self.task}/{self.split}"

    @property
    def title(self) -> str:
        return f"{self.cell} on {self.place}"


@dataclass(frozen=True)
class Row:
    """A merge under one reading, all seeds together. `test` and `val`: None where it failed or was not scored."""

    variant: Variant
    way: Way
    test: Line | None = None
    val: Line | None = None
    failed: str = ""

    @property
    def budget(self) -> str:
        """What merge and reading saw, in words."""
        fit = "the fit's" if self.variant.fitted else ""
        if self.way.support is None:
            return f"{fit} inputs" if fit else "no inputs"
        shots = self.way.shots
        read = "all inputs" if shots is None else f"{shots:g} a class" if shots >= 1 else f"{shots:.0%} of the inputs"
        kind = "" if self.way.access == "inductive" else f" ({self.way.access})"
        return f"{fit} and {read}{kind}" if fit else f"{read}{kind}"


@dataclass(frozen=True)
class Best:
    """Of one budget. `chosen`: by validation, None where there is none; `hindsight`: by test."""

    budget: str
    chosen: Row | None
    hindsight: Row


def rows_of(
    cells: Iterable[Cell], records: Sequence[Record], validation: Sequence[Record], failures: Sequence[Failure]
) -> list[Row]:
    """One row for each merge and reading, in the order of the cells."""
    test, val = ({(line.method, line.way): line for line in lines(part)} for part in (records, validation))
    failed: dict[tuple[str, Way], str] = {}
    for failure in failures:
        failed.setdefault((failure.name, failure.way), failure.message)
    found: dict[tuple[str, Way], Row] = {}
    for cell in cells:
        key = (cell.variant.name, cell.way)
        if key not in found:
            found[key] = Row(cell.variant, cell.way, test.get(key), val.get(key), failed.get(key, ""))
    return list(found.values())


def told_failures(failures: Iterable[Failure]) -> list[str]:
    """One line for each reason, with the cells that failed for it."""
    groups: dict[str, list[Failure]] = {}
    for failure in failures:
        groups.setdefault(" ".join(failure.message.split()), []).append(failure)
    found = []
    for message, group in groups.items():
        cells, places = (dict.fromkeys(getattr(each, name) for each in group) for name in ("cell", "place"))
        found.append(f"{some(cells)} on {', '.join(places)}: {message}")
    return found


def best_of(rows: Iterable[Row]) -> list[Best]:
    """By budget, in the order in which budgets come; of equals the first. Rows that failed anywhere have no part."""
    groups: dict[str, list[tuple[Row, Line]]] = {}
    for row in rows:
        if row.test is not None and not row.failed:
            groups.setdefault(row.budget, []).append((row, row.test))
    found = []
    for budget, group in groups.items():
        scored = [(row, row.val) for row, _ in group if row.val is not None]
        chosen = max(scored, key=lambda pair: pair[1].mean)[0] if scored else None
        found.append(Best(budget, chosen, max(group, key=lambda pair: pair[1].mean)[0]))
    return found


def sweep_csv(rows: Sequence[Row], best: Sequence[Best], tasks: Sequence[str]) -> str:
    """Every row with its numbers; `best` says why a row was chosen."""
    heads = ("best", "budget", "method", "scale", "merge", "read by", "access", "shots", "seeds")
    cells: list[tuple[Value, ...]] = []
    for row in rows:
        line, way = row.test, row.way
        shots = "" if way.support is None else "all" if way.shots is None else way.shots
        numbers = ["" for _ in range(4 + len(tasks))] if line is None else _numbers(line, tasks)
        cells.append(
            (
                _why(row, best),
                row.budget,
                row.variant.method,
                row.variant.parameters.get("scale", ""),
                row.variant.name,
                way.title,
                way.access,
                shots,
                "" if line is None else line.seeds,
                "" if row.val is None else f"{row.val.mean:.3f}",
                *numbers,
                row.failed,
            )
        )
    return csv_text((*heads, "val", "test", "low", "high", "sd", *tasks, "failed"), cells)


def _why(row: Row, best: Iterable[Best]) -> str:
    told = [("val", item.chosen) for item in best] + [("hindsight", item.hindsight) for item in best]
    return " and ".join(word for word, chosen in told if chosen is row)


def _numbers(line: Line, tasks: Iterable[str]) -> list[str]:
    spread = "" if line.spread is None else f"{line.spread:.3f}"
    values = (f"{line.values[task]:.3f}" if task in line.values else "" for task in tasks)
    return [f"{line.mean:.3f}", f"{line.low:.3f}", f"{line.high:.3f}", spread, *values]


def sweep_markdown(
    rows: Sequence[Row], best: Sequence[Best], failures: Sequence[Failure], references: Mapping[str, float]
) -> str:
    """The best for each budget, all rows, and what failed."""
    honest = any(item.chosen is not None for item in best)
    parts = [(_honest_sheet if honest else _hindsight_sheet)(best).markdown() if best else "No cell was scored."]
    if references:
        told = ", ".join(f"{name} {value:.1f}" for name, value in references.items())
        parts.append(f"For comparison, heads as they are, mean over tasks on test: {told}.")
    parts.append(_all_sheet(rows).markdown())
    if failures:
        parts.append("\n".join(("### Failed", "", *(f"- {markdown_escape(line)}" for line in told_failures(failures)))))
    return "\n\n".join(parts) + "\n"


def _honest_sheet(best: Sequence[Best]) -> Table:
    columns = ("budget", "merge", "read by", "best in hindsight", "val", "test", "95 %", "hindsight")
    cells = []
    for item in best:
        row, late = item.chosen, item.hindsight
        if row is None or row.test is None or row.val is None or late.test is None:
            cells.append((item.budget, "none was scored on val", "", _cell(late), "", "", "", _mean(late.test)))
            continue
        span = f"{row.test.low:.1f}-{row.test.high:.1f}"
        cells.append(
            (
                item.budget,
                row.variant.name,
                row.way.title,
                "the same" if late is row else _cell(late),
                _mean(row.val),
                _mean(row.test),
                span,
                _mean(late.test),
            )
        )
    note = (
        "Chosen by the mean accuracy on labelled validation inputs; test had no part in it. The best in hindsight is "
        "chosen by the test accuracy that is shown, which flatters it."
    )
    return Table.of("Best for each budget of inputs, chosen on validation", columns, cells, left=4, note=note)


def _hindsight_sheet(best: Sequence[Best]) -> Table:
    columns = ("budget", "merge", "read by", "test", "95 %")
    cells = tuple(
        (
            item.budget,
            item.hindsight.variant.name,
            item.hindsight.way.title,
            _mean(item.hindsight.test),
            "" if item.hindsight.test is None else f"{item.hindsight.test.low:.1f}-{item.hindsight.test.high:.1f}",
        )
        for item in best
    )
    note = (
        "Chosen by the very test accuracy that is shown, which flatters it: a model chosen so will do worse on other "
        "inputs. With `choose: val` the choice is made elsewhere."
    )
    return Table.of("Best in hindsight for each budget of inputs", columns, cells, left=3, note=note)


def _all_sheet(rows: Sequence[Row]) -> Table:
    cells = tuple(
        (
            row.budget,
            row.variant.name,
            row.way.title,
            *(("failed", "", "", "", "") if row.failed else ("", *_told(row))),
        )
        for row in rows
    )
    return Table.of("All cells", ("budget", "merge", "read by", "", "val", "test", "sd", "seeds"), cells, left=4)


def _told(row: Row) -> tuple[str, ...]:
    if row.test is None:
        return ("", "", "", "")
    spread = "" if row.test.spread is None else f"{row.test.spread:.1f}"
    return (_mean(row.val), _mean(row.test), spread, str(row.test.seeds))


def _cell(row: Row) -> str:
    return f"{row.variant.name}, {row.way.title}"


def _mean(line: Line | None) -> str:
    return "" if line is None else f"{line.mean:.1f}"
