"""The run in one sentence: what the experts score, what their merge keeps, and what aligned heads win back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orthomerge.analysis.figures import Bars, Series
from orthomerge.report.tables import REFERENCES, Board, Row

_NAN = float("nan")
_EXACT = 0.05  # below what is printed


@dataclass(frozen=True)
class Step:
    """One number of the story: `expert`, `merged` or `aligned`, and the row that it is the mean of."""

    kind: str
    title: str
    detail: str
    row: Row

    @property
    def mean(self) -> float:
        return self.row.line.mean


@dataclass(frozen=True)
class Story:
    """`sentence` in plain words; `steps` in their order, those that were measured."""

    sentence: str
    steps: tuple[Step, ...]
    tasks: tuple[str, ...]


def story(boards: Sequence[Board], *, method: str | None = None) -> Story:
    """`method`: the merge to speak of, if it was aligned; else the one that is best after it was."""
    rows = [row for board in boards for row in board.rows]
    tasks = boards[0].tasks
    found = []
    expert = _first(rows, "expert")
    if expert:
        found.append(Step("expert", "Experts", "one model a task", expert))
    aligned = _aligned(rows, method)
    merged = _first(rows, aligned.line.method) if aligned else None
    if aligned is None:
        plain = [row for row in rows if _is_merge(row) and row.line.way.aligner is None]
        chosen = [row for row in plain if row.line.method == method] or plain
        merged = max((row for row in chosen if row.line.protocol == "current"), key=_mean, default=None)
    if merged:
        found.append(Step("merged", "Merged", f"{merged.line.method}, heads as they are", merged))
    if aligned:
        found.append(Step("aligned", "Aligned", f"{aligned.line.title}, {aligned.line.access}", aligned))
    return Story(_sentence(found, len(tasks)), tuple(found), tasks)


def story_bars(told: Story) -> Bars | None:
    """The steps by task; nothing where there is only one."""
    if len(told.steps) < 2:
        return None
    series = [
        Series(
            step.title.lower(),
            _numbers(step.row, told.tasks, "value"),
            _numbers(step.row, told.tasks, "low"),
            _numbers(step.row, told.tasks, "high"),
        )
        for step in told.steps
    ]
    merge = next((step.row.line.method for step in told.steps if step.kind != "expert"), "")
    caption = f"Accuracy on each task, with 95 % intervals over test inputs. The merge is {merge}."
    return Bars("accuracy-by-task", "Task by task", caption, told.tasks, "accuracy, %", tuple(series))


def _numbers(row: Row, tasks: Sequence[str], end: str) -> tuple[float, ...]:
    return tuple(getattr(row.line.scores.get(task), end, _NAN) for task in tasks)


def _mean(row: Row) -> float:
    return row.line.mean


def _is_merge(row: Row) -> bool:
    return row.line.method not in REFERENCES and row.line.protocol != "joint"


def _first(rows: Sequence[Row], method: str) -> Row | None:
    """A method under the heads as they are."""
    own = [row for row in rows if row.line.method == method and row.line.way.aligner is None]
    return next((row for row in own if row.line.protocol == "current"), None)


def _aligned(rows: Sequence[Row], method: str | None) -> Row | None:
    """The best merge whose heads were aligned without labels; what has seen the test inputs only if nothing else is."""
    read = [row for row in rows if row.line.way.aligner is not None or row.line.protocol == "aligned-c"]
    read = [row for row in read if _is_merge(row) and _first(rows, row.line.method) is not None]
    own = [row for row in read if row.line.method == method] or read
    for access in ("inductive", "transductive"):
        if chosen := [row for row in own if row.line.access == access]:
            return max(chosen, key=_mean)
    return None


def _sentence(steps: Sequence[Step], tasks: int) -> str:
    by = {step.kind: step for step in steps}
    over = f"over {tasks} tasks" if tasks > 1 else "on one task"
    parts = []
    if expert := by.get("expert"):
        parts.append(f"The experts score {expert.mean:.1f} % {over}.")
    if merged := by.get("merged"):
        verb = "keeps" if expert and merged.mean < expert.mean else "reaches"
        where = "" if expert else f" {over}"
        parts.append(
            f"Merged into one encoder by {merged.row.line.method}, the model {verb} {merged.mean:.1f} %{where}."
        )
    if merged and (aligned := by.get("aligned")):
        parts.append(_ending(aligned, merged, expert))
    return " ".join(parts) or f"Accuracy {over}."


def _ending(aligned: Step, merged: Step, expert: Step | None) -> str:
    text = f"With its heads aligned it reaches {aligned.mean:.1f} %"
    if expert and expert.mean - merged.mean > _EXACT and aligned.mean > merged.mean:
        share = (aligned.mean - merged.mean) / (expert.mean - merged.mean)
        text += f": {100 * min(share, 1):.0f} % of what merging had lost is won back"
    if aligned.row.line.extra == 0:
        text += ", without a single new parameter"
    seen = {
        "transductive": " (aligned on the test inputs themselves)",
    }
    return text + seen.get(aligned.row.line.access, "") + "."
