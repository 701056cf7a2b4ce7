"""The accuracy tables of a report: a row for each method and way of reading, access classes never mixed.

What a row says is `evaluation.tables.lines`; here come beside it the interval of every cell, what inference costs
beyond encoder and heads, and what the run's comparisons say of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orthomerge.evaluation.comparisons import Comparison
from orthomerge.evaluation.tables import TITLES, Line, Sheet, lines
from orthomerge.records import Access, Record, Way

__all__ = ["MARKS", "REFERENCES", "Board", "Cell", "Row", "boards", "legend", "mark", "sheet"]

REFERENCES = ("expert", "base", "mtl")  # no merges: what merges are measured by
_CEILINGS = ("probe",)
_ORDER: tuple[Access, ...] = ("inductive", "data-free", "transductive")
MARKS: Mapping[str, str] = {"reference": "★", "better": "↑", "worse": "↓", "comparable": "≈", "undecided": "?"}


@dataclass(frozen=True)
class Cell:
    """One task in one row, in percent. `told`: better or worse than the reference by McNemar, else empty."""

    value: float
    low: float
    high: float
    examples: int
    told: str = ""


@dataclass(frozen=True)
class Row:
    """`verdict` of the comparison with `against`; both empty where there was none, `reference` for what it was with.

    `best`: the best mean of a merge that needs nothing beyond encoder and heads, on all tasks of the board.
    """

    line: Line
    cells: dict[str, Cell]
    extra: int
    verdict: str = ""
    against: str = ""
    best: bool = False


@dataclass(frozen=True)
class Board:
    """One table. `key`: an access class."""

    key: str
    title: str
    tasks: tuple[str, ...]
    rows: tuple[Row, ...]
    margin: float | None = None

    @property
    def several(self) -> bool:
        """Whether some row has more than one seed."""
        return any(row.line.seeds > 1 for row in self.rows)


_Key = tuple[str, Way]


def boards(records: Sequence[Record], comparisons: Sequence[Comparison] = ()) -> list[Board]:
    """One table for each access class that occurs, inductive first."""
    measured = [record for record in records if record.metric == "accuracy"]
    tasks = tuple(dict.fromkeys(record.task for record in measured))
    results = _rows(measured, comparisons)
    found = []
    for access in _ORDER:
        rows = [row for row in results if row.line.access == access]
        if rows:
            margins = {item.equivalence.margin for item in comparisons if item.way.access == access}
            margin = margins.pop() if len(margins) == 1 else None
            # A joint label space is another question: its rows stand together, after the others.
            rows.sort(key=lambda row: row.line.protocol == "joint")
            found.append(Board(access, TITLES[access], tasks, tuple(_with_best(rows)), margin))
    return found


def mark(verdict: str) -> str:
    """A verdict as one or two signs: `worse, but comparable` is `↓≈`."""
    return "".join(sign for word, sign in MARKS.items() if word in verdict)


def legend(board: Board) -> str:
    """What the signs of a table mean; empty where it has none."""
    if not any(row.verdict for row in board.rows):
        return ""
    within = (
        "the margin" if board.margin is None else f"{100 * board.margin:g} point{'s' if board.margin != 0.01 else ''}"
    )
    return (
        f"{MARKS['reference']} what the others that were read in the same way are compared with; "
        f"{MARKS['better']} better, {MARKS['worse']} worse than it (paired bootstrap, Holm, p < 0.05); "
        f"{MARKS['comparable']} comparable: less than {within} apart by two one-sided tests; "
        f"{MARKS['undecided']} undecided."
    )


def sheet(board: Board) -> Sheet:
    """A table in words. Rows that are no results of a merge are there too: nothing is left out."""
    marked = any(row.verdict for row in board.rows)
    columns = ["method", "protocol", *board.tasks, "mean", "95 %"]
    columns += [*(["ref."] if marked else []), *(["sd", "worst", "seeds"] if board.several else []), "extra"]
    cells = []
    for row in board.rows:
        line = row.line
        told = [line.method, line.title]
        told += [f"{row.cells[task].value:.1f}" if task in row.cells else "" for task in board.tasks]
        told += [f"{line.mean:.1f}", f"{line.low:.1f}-{line.high:.1f}", *([mark(row.verdict)] if marked else [])]
        if board.several:
            spread = ["", ""] if line.spread is None else [f"{line.spread:.1f}", f"{line.worst_seed:.1f}"]
            told += [*spread, str(line.seeds)]
        cells.append((*told, f"{row.extra:,}"))
    return Sheet(board.title, tuple(columns), tuple(cells), left=2, note=_note(board))


def _note(board: Board) -> str:
    extra = "extra: numbers that inference needs beyond encoder and heads."
    return " ".join(part for part in ("Accuracy in percent.", legend(board), extra) if part)


def _rows(records: Sequence[Record], comparisons: Sequence[Comparison]) -> list[Row]:
    alone: dict[str, dict[_Key, Line]] = {}
    extras: dict[_Key, int] = {}
    examples: dict[tuple[str, _Key], int] = {}
    for task in dict.fromkeys(record.task for record in records):
        part = lines([record for record in records if record.task == task])
        alone[task] = {(line.method, line.way): line for line in part}
    for record in records:
        key = (record.method, record.way)
        extras[key] = max(extras.get(key, 0), record.extra_parameters)
        examples[record.task, key] = record.examples
    against = {(item.method, item.way): item for item in comparisons}
    references = {(item.reference, item.way) for item in comparisons}
    rows = []
    for line in lines(records):
        key = (line.method, line.way)
        item = against.get(key)
        cells = {
            task: Cell(own[key].mean, own[key].low, own[key].high, examples[task, key], _told(item, task))
            for task, own in alone.items()
            if key in own
        }
        verdict = item.verdict if item else "reference" if key in references else ""
        rows.append(Row(line, cells, extras[key], verdict, item.reference if item else ""))
    return rows


def _told(item: Comparison | None, task: str) -> str:
    if item is None:
        return ""
    return "better" if task in item.better else "worse" if task in item.worse else ""


def _with_best(rows: Sequence[Row]) -> list[Row]:
    """References, ceilings and what was not scored on as many tasks as others cannot be the best."""
    merges = [
        row
        for row in rows
        if row.extra == 0 and row.line.method not in REFERENCES and row.line.protocol not in _CEILINGS
    ]
    widest = max((len(row.cells) for row in merges), default=0)
    best = max((row for row in merges if len(row.cells) == widest), key=lambda row: row.line.mean, default=None)
    return [Row(r.line, r.cells, r.extra, r.verdict, r.against, best=True) if r is best else r for r in rows]
