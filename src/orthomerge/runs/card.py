"""What a run has measured, on the model card of its output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from orthomerge.core.version import VERSION
from orthomerge.evaluation.records import Record
from orthomerge.files.ownership import MANIFEST
from orthomerge.models.model import Model
from orthomerge.models.writing import README, rewrite_card
from orthomerge.runs.digests import digest_of
from orthomerge.runs.models import output_digest


def card_key(out: Path, model: Model, records: Sequence[Record]) -> str:
    """What the card depends on beside the output."""
    return digest_of([VERSION, output_digest(out), evaluation_of(model, records)])


def write_card(out: Path, model: Model, records: Sequence[Record]) -> list[Path]:
    """Say on the card of an output what was measured of it; what was written."""
    rewrite_card(out, evaluation_of(model, records))
    return [out / README, out / MANIFEST]


def evaluation_of(model: Model, records: Sequence[Record]) -> dict[str, Any] | None:
    """The block `evaluation` of a manifest: scores of the model as it is, by task, beside base and experts.

    None if nobody asked for the protocol `current`.
    """
    own = list(_current(records, model.title))
    if not own:
        return None
    others = {role: {record.task: record.value for record in _current(records, role)} for role in ("expert", "base")}
    return {
        "orthomerge": VERSION,
        "metric": own[0].metric,
        "split": own[0].split,
        "access": own[0].access,
        "tasks": {
            record.task: {
                "value": record.value,
                "low": record.low,
                "high": record.high,
                "examples": record.examples,
                **{role: found[record.task] for role, found in others.items() if record.task in found},
            }
            for record in own
        },
    }


def _current(records: Iterable[Record], method: str) -> Iterable[Record]:
    for record in records:
        plain = record.protocol == "current" and record.aligner is None
        if plain and record.method == method:
            yield record
