"""The same merged features, read in other ways: what the records of a run say, and our own probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orthomerge.analysis.families import mean_interval
from orthomerge.analysis.look import Look
from orthomerge.analysis.verdict import Witness
from orthomerge.evaluation.records import Record
from orthomerge.evaluation.tables import lines

_WITH_LABELS = ("knn", "probe")


def recorded_witnesses(records: Sequence[Record], tasks: Sequence[str], *, model: str) -> tuple[Witness, ...]:
    """Readings with labels of the encoder with the digest `model`, on all the tasks; fitted on no test input."""
    ours = [record for record in records if record.inputs.get("model") == model]
    return tuple(
        Witness(line.title, line.mean, line.low, line.high)
        for line in lines(ours)
        if line.protocol in _WITH_LABELS and line.access == "inductive" and set(line.values) == set(tasks)
    )


def probe_witnesses(found: Mapping[str, Look]) -> tuple[Witness, ...]:
    """The probe of every task; none if a task has none."""
    if not all("probe" in one.hits for one in found.values()):
        return ()
    name = f"linear probe, {min(one.probed for one in found.values())} inputs"
    return (Witness(name, *mean_interval([one.hits["probe"] for one in found.values()])),)


def recorded_name(records: Sequence[Record], name: str, *, model: str) -> str:
    """What the records call a subject: by its name or else, first of all, by its weights."""
    if any(record.method == name for record in records):
        return name
    return next((record.method for record in records if record.inputs.get("model") == model), name)
