"""The numbers of a sweep: features of a model, and what is read of them, task by task and readout by readout.

JOB/records.jsonl        on test
JOB/validation.jsonl     the same on val, where the best is chosen there
JOB/predictions/*.npz    behind the records on test
JOB/failed.json          questions that could not be answered, and why
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from orthomerge.checkpoints.publish import write_bytes, write_json
from orthomerge.data.reading import read_task
from orthomerge.data.task import Task
from orthomerge.errors import OrthomergeError, OutputError, RecipeError
from orthomerge.evaluation.evaluate import Bench, Question, Subject, evaluate, truth_of
from orthomerge.evaluation.notes import contamination_notes
from orthomerge.manifest import access_class, read_manifest
from orthomerge.records import Record, write_records
from orthomerge.running.evaluation import RECORDS, bench_of
from orthomerge.running.jobs.context import MODEL, Context
from orthomerge.running.jobs.kinds.sweep_models import FAILED, failure_before, noted, told
from orthomerge.running.models import Places
from orthomerge.running.sweeping.cutting import readout_of
from orthomerge.version import VERSION

__all__ = ["MERGE", "NOTES", "VALIDATION", "encode", "joint", "notes", "score"]

VALIDATION, NOTES, MERGE = "validation.jsonl", "notes.json", "merge.json"
_TOLD = ("method", "inputs", "heads", "family", "fit", "seed")  # of a manifest, for the report
_MOST_BYTES = 150  # of a file's name, before its digest


def encode(context: Context, folder: Path) -> None:
    """Make the features of one task under one model, and name them."""
    if failure_before(context, folder):
        return
    spec, model = context.job.spec, _model(context)
    with noted(folder):
        bench = _bench(context, [spec["task"]], "test")
        made = {}
        for split in spec["splits"]:
            bench.features(model, spec["task"], split)
            made[split] = bench.key(model, spec["task"], split).digest
        write_json(folder / "features.json", made)


def score(context: Context, folder: Path) -> None:
    """Answer every question of one readout about one task."""
    if failure_before(context, folder):
        return
    spec, model, failures = context.job.spec, _model(context), list[dict[str, Any]]()
    task, block = spec["task"], context.recipe.evaluate
    support = None if block is None else block.support
    questions = readout_of(context.job).questions(first=spec["first"], seeds=spec["seeds"], support=support)
    for split in spec["splits"]:
        bench, found = _bench(context, [task], split), list[tuple[Record, torch.Tensor]]()
        subject = _subject(spec["subject"], model, [task])
        for question in questions:
            try:
                found += evaluate(bench, [subject], [question])
            except OutputError:
                raise
            except OrthomergeError as error:
                failures.append(_failure(question, split, error))
        _write(folder, bench, subject, found, split)
    if failures:
        write_json(folder / FAILED, failures)


def joint(context: Context, folder: Path) -> None:
    """All labels in one space; and what the report says of the merge, which outlives the model."""
    if failure_before(context, folder):
        return
    model, block = _model(context), context.recipe.evaluate
    tasks = list(block.data) if block is not None else []
    subject, seed = _subject(context.job.spec["subject"], model, tasks), context.job.spec["first"]
    with noted(folder):
        bench = _bench(context, tasks, "test")
        found = [(replace(record, seed=seed), predicted) for record, predicted in evaluate(bench, [subject], [])]
        _write(folder, bench, subject, found, "test")
        manifest = read_manifest(model)
        write_json(folder / MERGE, {name: manifest[name] for name in _TOLD if name in manifest})


def notes(context: Context, folder: Path) -> None:
    """What would make a reader doubt the numbers."""
    tasks = context.job.spec["tasks"]
    experts = context.needed("sweep-expert")  # of all tasks, or of none
    teachers = {task: place / MODEL for task, place in zip(tasks, experts, strict=False)}
    write_json(folder / NOTES, contamination_notes(_bench(context, tasks, "test", teachers)))


def _model(context: Context) -> Path:
    """What a job scores comes first among what it needs."""
    return context.store.place(context.job.needs[0]) / MODEL


def _subject(name: str, model: Path, tasks: Iterable[str]) -> Subject:
    manifest = read_manifest(model)
    parameters = {} if name in ("base", "expert") else manifest["method"]["parameters"]
    return Subject(name, dict.fromkeys(tasks, model), parameters, access_class(manifest))


def _bench(context: Context, tasks: Iterable[str], split: str, teachers: Mapping[str, Path] | None = None) -> Bench:
    """Some tasks, one split of which is scored as the test split is; inputs are read as the base reads them."""
    block, (like,) = context.recipe.evaluate, context.needed("sweep-base")
    if block is None:
        raise RecipeError("the recipe has no block 'evaluate', but the plan scores; plan again")
    data: Any = {task: _scored(_task(context, block.data[task]), split) for task in tasks}
    own = replace(block, data=data)
    if teachers is None:
        teachers = {task: place / MODEL for task in data for place in context.needed("sweep-expert")[-1:]}
    return bench_of(replace(context.recipe, evaluate=own), Places(like / MODEL, None, None, teachers))


def _task(context: Context, source: str) -> Task:
    context.check_data([source])
    known = context.plan.inputs.get(source)
    return _read(source, "" if known is None else known.digest)


@lru_cache(maxsize=2)  # jobs of one task follow each other
def _read(source: str, digest: str) -> Task:
    return read_task(source)


def _scored(task: Task, split: str) -> Task:
    """A task whose test split is another of its splits; the real one is then out of reach."""
    if split == "test":
        return task
    others = {name: part for name, part in task.splits.items() if name not in (split, "test")}
    return replace(task, splits={**others, "test": replace(task[split], split="test")})


def _failure(question: Question, split: str, error: OrthomergeError) -> dict[str, Any]:
    return {**told(error), "split": split, "shots": question.shots, "access": question.access}


def _write(
    folder: Path, bench: Bench, subject: Subject, found: Iterable[tuple[Record, torch.Tensor]], split: str
) -> None:
    records = []
    for record, predicted in found:
        name = None
        if split == "test":
            truth = truth_of(bench, subject, record).numpy().astype(np.int32)
            name = _keep(folder, record, predicted.numpy().astype(np.int32), truth)
        versions = {"orthomerge": VERSION, "torch": torch.__version__}
        records.append(replace(record, split=split, predictions=name, versions=versions))
    write_records(folder / (RECORDS if split == "test" else VALIDATION), records)


def _keep(folder: Path, record: Record, predicted: np.ndarray[Any, Any], truth: np.ndarray[Any, Any]) -> str:
    """The name of a file of predictions, which no others have."""
    said = hashlib.sha256(predicted.tobytes() + truth.tobytes()).hexdigest()
    key = hashlib.sha256(repr((record.method, record.task, record.seed, record.way, said)).encode()).hexdigest()
    (folder / "predictions").mkdir(exist_ok=True)
    data = BytesIO()
    np.savez_compressed(data, predicted=predicted, truth=truth)
    method = record.method.split(" ", 1)[0]
    shown = f"{method}-{record.task}-{record.aligner or record.protocol}".replace("/", "_")
    shown = shown.encode()[:_MOST_BYTES].decode(errors="ignore")
    name = f"predictions/{shown}-{record.seed}-{key[:16]}.npz"
    write_bytes(folder / name, data.getvalue())
    return name
