"""The scores of a sweep: base and experts as references, then each merge, scored in every way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from orthomerge.core.errors import IncompatibleError, NumericalError, OrthomergeError, OutputError, RecipeError
from orthomerge.core.progress import Progress
from orthomerge.core.version import VERSION
from orthomerge.data.tasks import labelled_tasks
from orthomerge.evaluation.comparisons import Predictions
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.evaluate import evaluate
from orthomerge.evaluation.protocol import EvaluationProtocol
from orthomerge.evaluation.records import Record
from orthomerge.evaluation.running import prediction_name, put_predictions
from orthomerge.evaluation.subject import Subject
from orthomerge.files.run_folder import claim
from orthomerge.models.encoding import Encoding
from orthomerge.models.experts import Experts
from orthomerge.models.model import Model
from orthomerge.models.reopening import record_of
from orthomerge.runs.recipe import Recipe
from orthomerge.runs.sweeping.cells import Variant, readouts_of, sweep_of
from orthomerge.runs.sweeping.choosing import Failure

_REFERENCES = ("base", "expert")


@dataclass(frozen=True)
class Result:
    """The scores of one model: records on test and val, and what failed. `facts`: how it was made, for a report."""

    records: tuple[Record, ...] = ()
    validation: tuple[Record, ...] = ()
    failures: tuple[Failure, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scorer:
    """Scores models in memory; predictions go to `run`."""

    recipe: Recipe
    experts: Experts
    run: Path
    splits: tuple[str, ...]
    progress: Progress

    @cached_property
    def encoded(self) -> dict[str, EncodedTasks]:
        """The tasks for each split that is scored; experts only if they are references or teachers."""
        _, scored = sweep_of(self.recipe)
        labels = {task: head.labels for task, head in self.experts.heads.items()}
        tasks = labelled_tasks(scored.data, labels, self.experts.family.modality)
        needed = scored.references or any(readout.teaches for readout in readouts_of(self.recipe))
        teachers = {task: self.experts.teacher(task) for task in tasks} if needed else {}
        how = Encoding(device=scored.device, batch=scored.batch)
        encoded = {"test": EncodedTasks(tasks, teachers, how, self.progress)}
        if "val" in self.splits:  # in the place of the test split, which is then out of reach
            val = {}
            for name, task in tasks.items():
                others = {split: part for split, part in task.splits.items() if split not in ("val", "test")}
                val[name] = replace(task, splits={**others, "test": replace(task["val"], split="test")})
            encoded["val"] = EncodedTasks(val, teachers, how, self.progress)
        return encoded

    def score(self, variant: Variant, models: Mapping[str, Model]) -> Result:
        """Score the model of each task in every way on every split. A protocol that fails ends nothing but itself."""
        records: dict[str, list[Record]] = {split: [] for split in self.splits}
        failures = list[Failure]()
        for task, model in models.items():
            subject = _subject(variant, {task: model})
            for protocol in self._protocols(variant):
                for split in self.splits:
                    try:
                        records[split] += self._records(subject, protocol, split)
                    except OutputError:
                        raise
                    except OrthomergeError as error:
                        failures.append(_failure(variant, task, protocol, split, error))
        if variant.name == "expert":
            return Result(tuple(records["test"]), tuple(records.get("val", ())), tuple(failures))
        subject, facts = _subject(variant, models), dict[str, Any]()
        try:
            records["test"] += self._records(subject, None, "test", seed=variant.first)
        except OutputError:
            raise
        except OrthomergeError:  # of the features, which is among the failures
            pass
        else:
            facts = {} if variant.name == "base" else self._facts(next(iter(models.values())))
        return Result(tuple(records["test"]), tuple(records.get("val", ())), tuple(failures), facts)

    def failed(self, variant: Variant, error: OrthomergeError) -> Result:
        """The result of a merge that could not be made."""
        scored = [(task, protocol) for task in self.encoded["test"].tasks for protocol in self._protocols(variant)]
        return Result(failures=tuple(_failure(variant, task, protocol, "test", error) for task, protocol in scored))

    def _protocols(self, variant: Variant) -> list[EvaluationProtocol]:
        _, scored = sweep_of(self.recipe)
        return [
            protocol
            for readout in readouts_of(self.recipe)
            if variant.name != "expert" or not readout.teaches
            for protocol in readout.protocols(first=variant.first, seeds=variant.seeds, support=scored.support)
        ]

    def _records(
        self, subject: Subject, protocol: EvaluationProtocol | None, split: str, *, seed: int | None = None
    ) -> list[Record]:
        """The records of a protocol, or of all labels in one space; predictions on test are kept."""
        versions = {"orthomerge": VERSION, "torch": torch.__version__}
        protocols = [] if protocol is None else [protocol]
        records, predictions = list[Record](), dict[str, Predictions]()
        for answer in evaluate([subject], protocols, self.encoded[split]):
            record = answer.record
            own = replace(record, split=split, seed=record.seed if seed is None else seed, versions=versions)
            if split == "test":
                each = Predictions(answer.predicted.numpy().astype(np.int32), answer.truth.numpy().astype(np.int32))
                own = replace(own, predictions=prediction_name(own, each))
                predictions[own.predictions or ""] = each
            records.append(own)
        claim(self.run, predictions)
        put_predictions(self.run, predictions)
        return records

    @cached_property
    def _inputs(self) -> dict[str, Any]:
        """What identifies base and experts."""
        base = self.experts.base
        origin = replace(base.origin, experts=self.experts)
        inputs: dict[str, Any] = record_of(base.with_heads({}, origin))["inputs"]
        return inputs

    def _facts(self, model: Model) -> dict[str, Any]:
        """What the report says of a merge."""
        facts = model.origin.facts
        return {
            "method": facts["method"],
            "inputs": self._inputs,
            "heads": {task: {"labels": list(labels)} for task, labels in model.labels.items()},
            "family": model.family.name,
            **{name: facts[name] for name in ("fit", "seed") if name in facts},
        }


def _subject(variant: Variant, models: Mapping[str, Model]) -> Subject:
    model = next(iter(models.values()))
    parameters = {} if variant.name in _REFERENCES else model.origin.facts["method"]["parameters"]
    return Subject(variant.name, models, parameters, model.origin.access)


def _failure(variant: Variant, task: str, protocol: EvaluationProtocol, split: str, error: OrthomergeError) -> Failure:
    """What went wrong, and whether it would again: not for want of memory, say, but by its own numbers."""
    blank = Record("", "", "", "accuracy", 0, 0, 0, 0, variant.seen)
    lasting = isinstance(error, RecipeError | IncompatibleError | NumericalError)
    return Failure(variant.name, task, split, protocol.annotate(blank).way, str(error), lasting)
