"""The run in one sentence: what the experts score, what their merge keeps, and what aligned heads recover."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orthomerge.analysis.figures import Bars, Series
from orthomerge.report.tables import REFERENCES, Board, Row

_NAN = float("nan")
_EXACT = 0.05  # points below what is printed


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
    """The sentence, and the steps that were measured, in their order."""

    sentence: str
    steps: tuple[Step, ...]
    tasks: tuple[str, ...]


def story(boards: Sequence[Board], *, method: str | None = None) -> Story:
    """`method`: the merge to describe; if it was not aligned, the one that scores best."""
    rows, tasks = [row for board in boards for row in board.rows], boards[0].tasks
    expert, aligned = _current(rows, "expert"), _best_aligned(rows, method)
    merged = _current(rows, aligned.line.method) if aligned else _best_merged(rows, method)
    steps = []
    if expert:
        steps.append(Step("expert", "Experts", "one model per task", expert))
    if merged:
        steps.append(Step("merged", "Merged", f"{merged.line.method}, heads as they are", merged))
    if aligned:
        steps.append(Step("aligned", "Aligned", f"{aligned.line.title}, {aligned.line.access}", aligned))
    return Story(_sentence(steps, len(tasks)), tuple(steps), tasks)


def story_bars(summary: Story) -> Bars | None:
    """The steps by task; None of fewer than two."""
    if len(summary.steps) < 2:
        return None
    series = []
    for step in summary.steps:
        scores = [step.row.line.scores.get(task) for task in summary.tasks]
        values, low, high = (tuple(getattr(score, name, _NAN) for score in scores) for name in ("value", "low", "high"))
        series.append(Series(step.title.lower(), values, low, high))
    merge = next((step.row.line.method for step in summary.steps if step.kind != "expert"), "")
    caption = f"Accuracy on each task, with 95 % intervals over test inputs. The merge is {merge}."
    return Bars("accuracy-by-task", "Task by task", caption, summary.tasks, "accuracy, %", tuple(series))


def _mean(row: Row) -> float:
    return row.line.mean


def _is_merge(row: Row) -> bool:
    return row.line.method not in REFERENCES and row.line.protocol != "joint"


def _is_current(row: Row) -> bool:
    return row.line.protocol == "current" and row.line.way.aligner is None


def _current(rows: Sequence[Row], method: str) -> Row | None:
    """A method with its heads as they are."""
    return next((row for row in rows if row.line.method == method and _is_current(row)), None)


def _best_merged(rows: Sequence[Row], method: str | None) -> Row | None:
    merges = [row for row in rows if _is_merge(row) and _is_current(row)]
    return max([row for row in merges if row.line.method == method] or merges, key=_mean, default=None)


def _best_aligned(rows: Sequence[Row], method: str | None) -> Row | None:
    """The best merge aligned without labels; one that has seen the test inputs only if there is no other."""
    aligned = [
        row
        for row in rows
        if (row.line.way.aligner is not None or row.line.protocol == "aligned-c")
        and _is_merge(row)
        and _current(rows, row.line.method) is not None
    ]
    aligned = [row for row in aligned if row.line.method == method] or aligned
    inductive = [row for row in aligned if row.line.access == "inductive"]
    transductive = [row for row in aligned if row.line.access == "transductive"]
    return max(inductive or transductive, key=_mean, default=None)


def _sentence(steps: Sequence[Step], tasks: int) -> str:
    by = {step.kind: step for step in steps}
    expert, merged, aligned = (by.get(kind) for kind in ("expert", "merged", "aligned"))
    over = f"over {tasks} tasks" if tasks > 1 else "on one task"
    parts = []
    if expert:
        parts.append(f"The experts score {expert.mean:.1f} % {over}.")
    if merged:
        verb = "keeps" if expert and merged.mean < expert.mean else "reaches"
        where = "" if expert else f" {over}"
        parts.append(
            f"Merged into one encoder by {merged.row.line.method}, the model {verb} {merged.mean:.1f} %{where}."
        )
    if merged and aligned:
        parts.append(_ending(aligned, merged, expert))
    return " ".join(parts) or f"Accuracy {over}."


def _ending(aligned: Step, merged: Step, expert: Step | None) -> str:
    text = f"With its heads aligned it reaches {aligned.mean:.1f} %"
    if expert and expert.mean - merged.mean > _EXACT and aligned.mean > merged.mean:
        share = (aligned.mean - merged.mean) / (expert.mean - merged.mean)
        text += f": {100 * min(share, 1):.0f} % of what merging had lost is won back"
    if aligned.row.line.extra == 0:
        text += ", without a single new parameter"
    if aligned.row.line.access == "transductive":
        text += " (aligned on the test inputs themselves)"
    return f"{text}."
