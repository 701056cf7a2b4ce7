"""The models of a sweep and their scores: base and experts as references, then each merge, read in every way."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from orthomerge.checkpoints.replacing import replace_file
from orthomerge.data.reading import read_task
from orthomerge.errors import IncompatibleError, NumericalError, OrthomergeError, OutputError, RecipeError
from orthomerge.evaluation.evaluate import Bench, Question, Subject, evaluate, truth_of
from orthomerge.manifest import access_class, read_manifest
from orthomerge.pipeline import Progress, merge
from orthomerge.recipe import Recipe
from orthomerge.records import Record
from orthomerge.running.evaluation import bench_of
from orthomerge.running.models import Places, expert_of
from orthomerge.running.sweeping.cells import Variant, readouts_of, sweep_of
from orthomerge.running.sweeping.choosing import Failure
from orthomerge.version import VERSION

__all__ = ["Result", "Scorer"]

_FACTS = ("method", "inputs", "heads", "family", "fit", "seed")  # of a manifest, for the report
_MOST_BYTES = 150  # of a file's name, before its digest


@dataclass(frozen=True)
class Result:
    """The scores of one model: records on test and on val, and what failed. `facts`: of its manifest."""

    records: tuple[Record, ...] = ()
    validation: tuple[Record, ...] = ()
    failures: tuple[Failure, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scorer:
    """Makes and scores models. `models`: the folder for base and experts; predictions go to `run`."""

    recipe: Recipe
    run: Path
    models: Path
    splits: tuple[str, ...]
    progress: Progress

    @cached_property
    def base(self) -> Path:
        """The base under the experts' heads; where there is none, the average of the experts, which reads alike."""
        recipe = replace(self.recipe.merging, method="average", parameters={}, vector=None, align=None, fit=None)
        if recipe.base is not None:
            recipe = replace(recipe, method="task_arithmetic", parameters={"scale": 0.0})
        merge(recipe, out=self.models / "base", force=True)
        return self.models / "base"

    @cached_property
    def experts(self) -> dict[str, Path]:
        """The experts, weights unchanged, where they are references or teachers."""
        _, scored = sweep_of(self.recipe)
        if not scored.references and not any(readout.teaches for readout in readouts_of(self.recipe)):
            return {}
        places = {task: self.models / f"expert-{task}" for task in scored.data}
        for task, place in places.items():
            expert_of(self.recipe, self.base, task, place)
        return places

    @cached_property
    def benches(self) -> dict[str, Bench]:
        """The tasks for each split that is scored; inputs are read as the base reads them."""
        return {split: self._bench(split) for split in self.splits}

    def _bench(self, split: str) -> Bench:
        _, scored = sweep_of(self.recipe)
        data: dict[str, Any] = {}
        for name, source in scored.data.items():
            task = read_task(source) if isinstance(source, str) else source
            if split != "test":  # the real test split is then out of reach
                others = {other: part for other, part in task.splits.items() if other not in (split, "test")}
                task = replace(task, splits={**others, "test": replace(task[split], split="test")})
            data[name] = task
        recipe = replace(self.recipe, evaluate=replace(scored, data=data))
        places = Places(self.base, None, None, self.experts)
        return bench_of(recipe, places, say=lambda text: self.progress.stage(text, None))

    def score(self, variant: Variant, models: Mapping[str, Path]) -> Result:
        """Ask a model of each task every question on every split. A question that fails ends nothing but itself."""
        records: dict[str, list[Record]] = {split: [] for split in self.splits}
        failures = list[Failure]()
        for task, model in models.items():
            subject = _subject(variant, {task: model})
            for question in self._questions(variant):
                for split, bench in self.benches.items():
                    try:
                        records[split] += self._records(bench, subject, question, split)
                    except OutputError:
                        raise
                    except OrthomergeError as error:
                        failures.append(_failure(variant, task, question, split, error))
        if variant.name == "expert":
            return Result(tuple(records["test"]), tuple(records.get("val", ())), tuple(failures))
        subject, facts = _subject(variant, models), dict[str, Any]()
        try:
            records["test"] += self._records(self.benches["test"], subject, None, "test", seed=variant.first)
        except OutputError:
            raise
        except OrthomergeError:  # of the features, which is among the failures
            pass
        else:
            manifest = read_manifest(next(iter(models.values())))
            facts = {name: manifest[name] for name in _FACTS if name in manifest and variant.name != "base"}
        return Result(tuple(records["test"]), tuple(records.get("val", ())), tuple(failures), facts)

    def failed(self, variant: Variant, error: OrthomergeError) -> Result:
        """The result of a merge that could not be made."""
        asked = [(task, question) for task in self.benches["test"].tasks for question in self._questions(variant)]
        return Result(failures=tuple(_failure(variant, task, question, "test", error) for task, question in asked))

    def _questions(self, variant: Variant) -> list[Question]:
        _, scored = sweep_of(self.recipe)
        return [
            question
            for readout in readouts_of(self.recipe)
            if variant.name != "expert" or not readout.teaches
            for question in readout.questions(first=variant.first, seeds=variant.seeds, support=scored.support)
        ]

    def _records(
        self, bench: Bench, subject: Subject, question: Question | None, split: str, *, seed: int | None = None
    ) -> Iterator[Record]:
        """The records of a question, or of all labels in one space; predictions on test are kept."""
        versions = {"orthomerge": VERSION, "torch": torch.__version__}
        for record, predicted in list(evaluate(bench, [subject], [] if question is None else [question])):
            own = replace(record, split=split, seed=record.seed if seed is None else seed, versions=versions)
            if split == "test":
                truth = truth_of(bench, subject, own).numpy().astype(np.int32)
                own = replace(own, predictions=self._keep(own, predicted.numpy().astype(np.int32), truth))
            yield own

    def _keep(self, record: Record, predicted: np.ndarray[Any, Any], truth: np.ndarray[Any, Any]) -> str:
        """Write predictions to a file whose name no others have."""
        content = hashlib.sha256(predicted.tobytes() + truth.tobytes()).hexdigest()
        key = hashlib.sha256(repr((record.method, record.task, record.seed, record.way, content)).encode()).hexdigest()
        data = BytesIO()
        np.savez_compressed(data, predicted=predicted, truth=truth)
        method = record.method.split(" ", 1)[0]
        shown = f"{method}-{record.task}-{record.aligner or record.protocol}".replace("/", "_")
        shown = shown.encode()[:_MOST_BYTES].decode(errors="ignore")
        name = f"predictions/{shown}-{record.seed}-{key[:16]}.npz"
        (self.run / "predictions").mkdir(exist_ok=True)
        replace_file(self.run / name, data.getvalue())
        return name


def _subject(variant: Variant, models: Mapping[str, Path]) -> Subject:
    manifest = read_manifest(next(iter(models.values())))
    parameters = {} if variant.name in ("base", "expert") else manifest["method"]["parameters"]
    return Subject(variant.name, models, parameters, access_class(manifest))


def _failure(variant: Variant, task: str, question: Question, split: str, error: OrthomergeError) -> Failure:
    """What went wrong, and whether it would again: not for want of memory, say, but by its own numbers."""
    blank = Record("", "", "", "accuracy", 0, 0, 0, 0, variant.seen)
    lasting = isinstance(error, RecipeError | IncompatibleError | NumericalError)
    return Failure(variant.name, task, split, question.written(blank).way, str(error), lasting)
