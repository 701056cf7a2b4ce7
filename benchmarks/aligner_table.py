"""Aligner x number of inputs x merge, in one table for each merge: the protocols, and the tables made of their records.

Every cell says how many draws it is the mean of. All inputs are one draw: only what is random in an aligner itself is
repeated there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, stdev
from typing import get_args

from orthomerge.alignment.aligners import ALIGNERS
from orthomerge.core.schema import maker_of, schema
from orthomerge.core.table import Table
from orthomerge.data.task import Split
from orthomerge.evaluation.protocols import EvaluationProtocol
from orthomerge.evaluation.records import Record
from orthomerge.runs.sections import Access

MERGES = ("average", "task_arithmetic", "ties")
FEW = (1, 5, 20)  # inputs a class
SHARE = 0.1
GPU = ("aligned-m", "orth-m", "moma-orthogonal", "surgery", "probsurgery")  # worth one
LARGE = ("kl-map", "auto")  # with all inputs alone: small fits would wait for a GPU that others use
CONTROL = ("orthogonal", "affine", "ridge", "aligned-c", "auto")


def aligner_protocols(
    often: int = 20,
    seldom: int = 5,
    *,
    support: Split = "train",
    aligners: Sequence[str] = tuple(ALIGNERS),
    device: str = "cpu",
) -> list[EvaluationProtocol]:
    """Every aligner at every size from every merge: `often` draws of few inputs, `seldom` of a share or of seeds.

    `device`: where those that can do so solve.
    """
    found = [EvaluationProtocol(models=(*MERGES, "base"))]
    for aligner in aligners:
        control = ("base",) if aligner in CONTROL else ()
        repeated = seldom if _random(aligner) else 1
        for access in get_args(Access):
            found += [_ask(aligner, MERGES, access, shots, often) for shots in FEW]
            found.append(_ask(aligner, MERGES, access, SHARE, seldom))
            models = (*MERGES, *control) if access == "inductive" else MERGES
            found.append(_ask(aligner, models, access, None, repeated))
    there = {} if device == "cpu" else {"device": device}
    return [
        replace(
            protocol,
            support=support,
            fewer=True,
            options=there if protocol.aligner in GPU or (protocol.aligner in LARGE and protocol.shots is None) else {},
        )
        for protocol in found
    ]


def _random(aligner: str) -> bool:
    """Whether the same inputs may give another head."""
    return "seed" in schema(maker_of(ALIGNERS[aligner]))


def _ask(aligner: str, models: tuple[str, ...], access: Access, shots: float | None, seeds: int) -> EvaluationProtocol:
    return EvaluationProtocol(aligner=aligner, models=models, access=access, shots=shots, seeds=seeds)


def aligner_sheets(records: Sequence[Record]) -> list[Table]:
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
            found.append(Table.of(f"{subject}, {access}", columns, rows))
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
