"""Publish results of the store: models as hard links, files as copies, scores on the model card."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from orthomerge.core.errors import CheckpointError, OrthomergeError
from orthomerge.core.version import VERSION
from orthomerge.evaluation.records import Record
from orthomerge.evaluation.scores import DERIVED, RECORDS
from orthomerge.files.documents import write_json
from orthomerge.files.folders import LOCAL, RUN, claim, drop, existing_files, names_in
from orthomerge.files.publish import publish
from orthomerge.files.raw_file import RawFile
from orthomerge.files.replacing import remove_file, replace_file
from orthomerge.models.manifest import README, local_places, read_local, read_manifest
from orthomerge.models.writing import link_folder, plain, rewrite_card

_PREDICTIONS = "predictions/"


def place_model(content: Path, target: Path, *, force: bool, inputs: Iterable[Path] = ()) -> None:
    """Link a model of the store to `target`. `force`: replace a model that is there."""
    if is_same_model(content, target):
        return
    with publish(target, force=force, inputs=inputs) as folder:
        link_folder(content, folder, without={LOCAL})
        write_json(folder / LOCAL, local_places(read_local(content), target))


def is_same_model(content: Path, target: Path) -> bool:
    """Return whether a folder holds a model of the store; the cards may differ."""
    try:
        published, stored = (dict(read_manifest(folder)["files"]) for folder in (target, content))
        for files in (published, stored):
            files.pop(README, None)
        return published == stored and all(_is_same(content / name, target / name) for name in stored)
    except (OSError, CheckpointError):
        return False


def place_files(content: Path, run: Path) -> None:
    """Copy files of the store into the run folder: predictions, then records, then files derived from them."""
    names = sorted(own_names(content), key=lambda name: (not name.startswith(_PREDICTIONS), name in DERIVED, name))
    claim(run, names)
    if not all(_is_same(content / name, run / name) for name in names):
        for name in set(DERIVED) & set(names):
            remove_file(run / name)
        for name in names:
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            replace_file(run / name, (content / name).read_bytes())
    if RECORDS in names:
        drop(run, [name for name in existing_files(run) if name.startswith(_PREDICTIONS) and name not in names])


def own_names(content: Path) -> set[str]:
    """Return the names that the files of a result have in the run folder."""
    return {name for name in names_in(content) if name != RUN and not name.endswith("/")}


def place_scores(out: Path, title: str, records: Sequence[Record]) -> None:
    """Write the scores of the model called `title` on its card."""
    evaluation = evaluation_of(title, records)
    if read_manifest(out).get("evaluation") != plain(evaluation):
        rewrite_card(out, evaluation)


def evaluation_of(title: str, records: Sequence[Record]) -> dict[str, Any] | None:
    """Return the block `evaluation` of a manifest: scores by `current` beside base and experts; None without scores."""
    current = [record for record in records if record.protocol == "current" and record.aligner is None]
    scores = [record for record in current if record.method == title]
    if not scores:
        return None
    tasks: dict[str, dict[str, Any]] = {
        record.task: {name: getattr(record, name) for name in ("value", "low", "high", "examples")} for record in scores
    }
    for record in current:
        if record.method in ("expert", "base") and record.task in tasks:
            tasks[record.task][record.method] = record.value
    shared = {name: getattr(scores[0], name) for name in ("metric", "split", "access")}
    return {"orthomerge": VERSION, **shared, "tasks": tasks}


def _is_same(one: Path, other: Path) -> bool:
    try:
        if one.samefile(other):
            return True
        return one.stat().st_size == other.stat().st_size and RawFile(one).digest() == RawFile(other).digest()
    except (OSError, OrthomergeError):
        return False
