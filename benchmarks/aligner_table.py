"""Aligner x number of inputs x merge, in one table for each merge: the questions, and the sheets made of their records.

The aligners by gradient that the papers print cost seconds a fit where others cost milliseconds: they are asked less
often (`SLOW`: on task arithmetic only). Every cell says how many draws it is the mean of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, stdev

from orthomerge.alignment.aligners import ALIGNERS
from orthomerge.data.task import Split
from orthomerge.evaluation.evaluate import Question
from orthomerge.evaluation.tables import Sheet
from orthomerge.records import Access, Record

__all__ = ["aligner_questions", "aligner_sheets"]

MERGES = ("average", "task_arithmetic", "ties")
OFTEN = ("auto", "ridge", "aligned-c", "orthogonal", "affine")
SLOW = ("aligned-m", "orth-m", "moma-orthogonal", "probsurgery")
FEW: tuple[int | float, ...] = (1, 5, 20, 0.1)
SOLVING = ("kl-map", "auto")  # what a GPU is worth for
CONTROL = ("orthogonal", "affine", "ridge", "aligned-c", "auto")


def aligner_questions(
    often: int = 20,
    seldom: int = 5,
    rarely: int = 2,
    *,
    support: Split = "train",
    aligners: Sequence[str] = tuple(ALIGNERS),
    device: str = "cpu",
) -> list[Question]:
    """Every aligner at every size; `often` draws of few inputs for the main ones, `rarely` for the slow ones.

    `device`: where those that can do so solve.
    """
    found = [Question("current", subjects=(*MERGES, "base"))]
    for aligner in aligners:
        slow, main = aligner in SLOW, aligner in OFTEN
        merges = ("task_arithmetic",) if slow else MERGES
        for shots in (5,) if slow else FEW:
            draws = rarely if slow else often if main and shots >= 1 else seldom
            found.append(_ask(aligner, merges, "inductive", shots, draws))
        control = ("base",) if aligner in CONTROL else ()
        found.append(_ask(aligner, (*merges, *control), "inductive", None, 1))
        if main:
            found.append(_ask(aligner, merges, "transductive", 0.1, seldom))
        found.append(_ask(aligner, merges, "transductive", None, 1))
    there = {} if device == "cpu" else {"device": device}
    return [
        replace(
            question,
            support=support,
            fewer=True,
            options=there if question.aligner in SOLVING else {},
        )
        for question in found
    ]


def _ask(aligner: str, subjects: tuple[str, ...], access: Access, shots: float | None, seeds: int) -> Question:
    return Question("current", aligner=aligner, subjects=subjects, access=access, shots=shots, seeds=seeds)


def aligner_sheets(records: Sequence[Record]) -> list[Sheet]:
    """One table a subject: aligners down, numbers of inputs across; inductive first, transductive apart."""
    found = []
    for subject in dict.fromkeys(record.method for record in records):
        mine = [record for record in records if record.method == subject and record.protocol == "current"]
        unaligned = _cell([record for record in mine if record.aligner is None])
        for access in ("inductive", "transductive"):
            part = [record for record in mine if record.aligner is not None and record.access == access]
            if not part:
                continue
            sizes = sorted({_size(record) for record in part})
            rows = [("none", "0", *(unaligned for _ in sizes))]
            for aligner in dict.fromkeys(str(record.aligner) for record in part):
                own = [record for record in part if record.aligner == aligner]
                cells = [_cell([record for record in own if _size(record) == size]) for size in sizes]
                rows.append((aligner, f"{_extra(own):,}", *cells))
            columns = ("aligner", "extra parameters", *(name for _, name in sizes))
            found.append(Sheet(f"{subject}, {access}", columns, tuple(rows), left=1))
    return found


def _size(record: Record) -> tuple[float, str]:
    """An order, and a name."""
    if record.shots is None:
        return (1e9, "all")
    return (1e6, f"{record.shots:.0%}") if record.shots < 1 else (record.shots, f"{record.shots:g} a class")


def _cell(records: Sequence[Record]) -> str:
    """Mean over tasks, its deviation over draws, and how many there were."""
    by_seed: dict[int, list[float]] = {}
    for record in records:
        by_seed.setdefault(record.seed, []).append(100 * record.value)
    means = [mean(values) for values in by_seed.values()]
    if not means:
        return ""
    return f"{mean(means):.1f}" if len(means) == 1 else f"{mean(means):.1f} ± {stdev(means):.1f} ({len(means)})"


def _extra(records: Sequence[Record]) -> int:
    """Numbers beyond the heads, over all tasks."""
    by_task = {record.task: record.extra_parameters for record in records}
    return sum(by_task.values())
