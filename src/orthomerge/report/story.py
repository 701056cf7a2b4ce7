"""The run in one sentence: what the experts score, what their merge keeps, and what aligned heads recover."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orthomerge.analysis.figures import Bars, Series
from orthomerge.evaluation.tables import Line
from orthomerge.report.tables import REFERENCES, Board

_NAN = float("nan")
_EXACT = 0.05  # points below what is printed


@dataclass(frozen=True)
class Step:
    """One number of the story: `expert`, `merged` or `aligned`, and the line that it is the mean of."""

    kind: str
    title: str
    detail: str
    line: Line


@dataclass(frozen=True)
class Story:
    """The sentence, and the steps that were measured, in their order."""

    sentence: str
    steps: tuple[Step, ...]
    tasks: tuple[str, ...]


def story(boards: Sequence[Board], *, method: str | None = None) -> Story:
    """`method`: the merge to describe; if it was not aligned, the one that scores best."""
    lines, tasks = [row.line for board in boards for row in board.rows], boards[0].tasks
    current = {line.method: line for line in reversed(lines) if line.protocol == "current" and not line.way.aligner}
    merges = {name: line for name, line in current.items() if name not in REFERENCES}
    expert, aligned = current.get("expert"), _best_aligned([line for line in lines if line.method in merges], method)
    merged = merges[aligned.method] if aligned else merges.get(method or "") or _best(list(merges.values()))
    steps = []
    if expert:
        steps.append(Step("expert", "Experts", "one model per task", expert))
    if merged:
        steps.append(Step("merged", "Merged", f"{merged.method}, heads as they are", merged))
    if aligned:
        steps.append(Step("aligned", "Aligned", f"{aligned.title}, {aligned.access}", aligned))
    return Story(_sentence(expert, merged, aligned, len(tasks)), tuple(steps), tasks)


def story_bars(summary: Story) -> Bars | None:
    """The steps by task; None of fewer than two."""
    if len(summary.steps) < 2:
        return None
    series = []
    for step in summary.steps:
        scores = [step.line.scores.get(task) for task in summary.tasks]
        values, low, high = (tuple(getattr(score, name, _NAN) for score in scores) for name in ("value", "low", "high"))
        series.append(Series(step.title.lower(), values, low, high))
    merge = next((step.line.method for step in summary.steps if step.kind != "expert"), "")
    caption = f"Accuracy on each task, with 95 % intervals over test inputs. The merge is {merge}."
    return Bars("accuracy-by-task", "Task by task", caption, summary.tasks, "accuracy, %", tuple(series))


def _best(lines: Sequence[Line]) -> Line | None:
    return max(lines, key=lambda line: line.mean, default=None)


def _best_aligned(lines: Sequence[Line], method: str | None) -> Line | None:
    """The best merge aligned without labels; one that has seen the test inputs only if there is no other."""
    aligned = [
        line for line in lines if line.protocol == "aligned-c" or (line.way.aligner and line.protocol != "joint")
    ]
    aligned = [line for line in aligned if line.method == method] or aligned
    return _best([line for line in aligned if line.access == "inductive"]) or _best(aligned)


def _sentence(expert: Line | None, merged: Line | None, aligned: Line | None, tasks: int) -> str:
    over = f"over {tasks} tasks" if tasks > 1 else "on one task"
    parts = []
    if expert:
        parts.append(f"The experts score {expert.mean:.1f} % {over}.")
    if merged:
        verb = "keeps" if expert and merged.mean < expert.mean else "reaches"
        where = "" if expert else f" {over}"
        parts.append(f"Merged into one encoder by {merged.method}, the model {verb} {merged.mean:.1f} %{where}.")
    if merged and aligned:
        text = f"With its heads aligned it reaches {aligned.mean:.1f} %"
        if expert and expert.mean - merged.mean > _EXACT and aligned.mean > merged.mean:
            share = (aligned.mean - merged.mean) / (expert.mean - merged.mean)
            text += f": {100 * min(share, 1):.0f} % of what merging had lost is recovered"
        if aligned.extra == 0:
            text += ", without a single new parameter"
        if aligned.access == "transductive":
            text += " (aligned on the test inputs themselves)"
        parts.append(f"{text}.")
    return " ".join(parts) or f"Accuracy {over}."
