"""The scores of one model of a sweep, in every way and on every split; what fails is noted and ends nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from orthomerge.core.errors import IncompatibleError, NumericalError, OrthomergeError, OutputError, RecipeError
from orthomerge.evaluation.comparisons import Predictions
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.evaluate import Subject, evaluate
from orthomerge.evaluation.protocols import EvaluationProtocol
from orthomerge.evaluation.records import Record
from orthomerge.evaluation.scores import prediction_name, put_predictions
from orthomerge.models.model import Model
from orthomerge.models.modules import loaded
from orthomerge.models.record import record_of
from orthomerge.models.writing import write_model
from orthomerge.runs.models import input_paths, merge
from orthomerge.runs.sweeping.cells import REFERENCES, Variant, readouts_of, sweep_of
from orthomerge.runs.sweeping.choosing import Failure
from orthomerge.runs.work import Work

RESULT, FAILURE = "result.json", "failure.json"


@dataclass(frozen=True)
class Result:
    """The scores of one model: records on test and val, and what failed. `facts`: how it was made, for a report."""

    records: tuple[Record, ...] = ()
    validation: tuple[Record, ...] = ()
    failures: tuple[Failure, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)


def make_kept(place: Path, work: Work, *, variant: Variant) -> None:
    """Merge or fit, as a model folder; or say why that failed."""
    recipe = work.recipe
    try:
        model = merge(work.experts, variant.merge(recipe), recipe.compute, progress=work.progress)
        size = recipe.target.max_shard_size
        write_model(model, place, force=True, max_shard_size=size, inputs=input_paths(recipe))
    except OutputError:
        raise
    except OrthomergeError as error:
        failure = {"message": str(error), "lasting": _is_lasting(error)}
        (place / FAILURE).write_text(json.dumps(failure), encoding="utf-8")


def make_scores(place: Path, work: Work, *, variant: Variant, splits: tuple[str, ...], kept: str | None) -> None:
    """Score a merge, the base or the experts. `kept`: the model as it is in the store, if it is there."""
    scorer = _Scorer(work, variant, splits, place)
    failure = _failure_of(work, kept)
    if failure is None:
        try:
            result = scorer.result(_models(work, variant, kept))
        except OutputError:
            raise
        except OrthomergeError as error:
            failure = {"message": str(error), "lasting": _is_lasting(error)}
    if failure is not None:
        result = scorer.failed(**failure)
    (place / RESULT).write_text(json.dumps(asdict(result), ensure_ascii=False) + "\n", encoding="utf-8")


def _failure_of(work: Work, kept: str | None) -> dict[str, Any] | None:
    """Why a model that was to be kept could not be made; None if it was."""
    path = None if kept is None else work.folder(kept) / FAILURE
    if path is None or not path.is_file():
        return None
    failure: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return failure


def _models(work: Work, variant: Variant, kept: str | None) -> dict[str, Model]:
    """The model of each task, with its weights computed."""
    tasks, experts = work.encoded.tasks, work.experts
    if variant.name == "expert":
        return {task: experts.teacher(task) for task in tasks}
    if variant.name == "base":
        return dict.fromkeys(tasks, experts.base.with_heads(experts.heads))
    if kept is not None:
        return dict.fromkeys(tasks, work.model(kept))
    work.progress.stage("merging", None)
    model = merge(experts, variant.merge(work.recipe), work.recipe.compute, progress=work.progress)
    loaded(model.encoder)  # computes the weights, which are then kept while the model is scored
    return dict.fromkeys(tasks, model)


def encoded_by_split(work: Work, splits: tuple[str, ...]) -> dict[str, EncodedTasks]:
    """The tasks for each split that is scored; experts only if they are references or teachers."""
    encoded = work.encoded
    if not work.section.references and not any(readout.teaches for readout in readouts_of(work.recipe)):
        encoded = replace(encoded, teachers={})
    if "val" not in splits:
        return {"test": encoded}
    val = {}
    for name, task in encoded.tasks.items():  # in the place of the test split, which is then out of reach
        others = {split: part for split, part in task.splits.items() if split not in ("val", "test")}
        val[name] = replace(task, splits={**others, "test": replace(task["val"], split="test")})
    return {"test": encoded, "val": replace(encoded, tasks=val)}


@dataclass(frozen=True)
class _Scorer:
    """Scores one model; predictions go to `place`."""

    work: Work
    variant: Variant
    splits: tuple[str, ...]
    place: Path

    def result(self, models: Mapping[str, Model]) -> Result:
        """Score the model of each task in every way on every split. A protocol that fails ends nothing but itself."""
        encoded = encoded_by_split(self.work, self.splits)
        records: dict[str, list[Record]] = {split: [] for split in self.splits}
        failures, facts = list[Failure](), dict[str, Any]()
        for task, model in models.items():
            subject = self._subject({task: model})
            for protocol in self._protocols():
                for split in self.splits:
                    try:
                        records[split] += self._records(subject, [protocol], encoded[split], split)
                    except OutputError:
                        raise
                    except OrthomergeError as error:
                        failures.append(self._failure(task, protocol, split, str(error), _is_lasting(error)))
        if self.variant.name != "expert":
            try:  # all labels in one space
                records["test"] += self._records(self._subject(models), [], encoded["test"], "test")
            except OutputError:
                raise
            except OrthomergeError:  # of the features, which is among the failures
                pass
            else:
                facts = {} if self.variant.name == "base" else self._facts(next(iter(models.values())))
        return Result(tuple(records["test"]), tuple(records.get("val", ())), tuple(failures), facts)

    def failed(self, message: str, *, lasting: bool) -> Result:
        """The result of a merge that could not be made."""
        failures = [
            self._failure(task, protocol, "test", message, lasting)
            for task in self.work.encoded.tasks
            for protocol in self._protocols()
        ]
        return Result(failures=tuple(failures))

    def _protocols(self) -> Iterator[EvaluationProtocol]:
        variant, (_, scored) = self.variant, sweep_of(self.work.recipe)
        for readout in readouts_of(self.work.recipe):
            if variant.name != "expert" or not readout.teaches:
                yield from readout.protocols(first=variant.first, seeds=variant.seeds, support=scored.support)

    def _records(
        self, subject: Subject, protocols: list[EvaluationProtocol], encoded: EncodedTasks, split: str
    ) -> list[Record]:
        """The records of protocols, or of all labels in one space; predictions on test are kept."""
        records, predictions = list[Record](), dict[str, Predictions]()
        for item in evaluate([subject], protocols, encoded):
            record = replace(item.record, split=split, predictions=None)
            if not protocols:
                record = replace(record, seed=self.variant.first)
            if split == "test":
                name = prediction_name(record, item.predictions)
                record, predictions[name] = replace(record, predictions=name), item.predictions
            records.append(record)
        put_predictions(self.place, predictions)
        return records

    def _subject(self, models: Mapping[str, Model]) -> Subject:
        origin = next(iter(models.values())).origin
        parameters = {} if self.variant.name in REFERENCES else origin.facts["method"]["parameters"]
        return Subject(self.variant.name, models, parameters, origin.access)

    def _failure(self, task: str, protocol: EvaluationProtocol, split: str, message: str, lasting: bool) -> Failure:
        return Failure(self.variant.name, task, split, protocol.way(self.variant.seen), message, lasting)

    def _facts(self, model: Model) -> dict[str, Any]:
        """What the report says of a merge."""
        facts, base = model.origin.facts, self.work.experts.base
        origin = replace(base.origin, experts=self.work.experts)
        return {
            "method": facts["method"],
            "inputs": record_of(base.with_heads({}, origin))["inputs"],
            "heads": {task: {"labels": list(labels)} for task, labels in model.labels.items()},
            "family": model.family.name,
            **{name: facts[name] for name in ("fit", "seed") if name in facts},
        }


def _is_lasting(error: OrthomergeError) -> bool:
    """Whether it would fail again: by its own numbers, and not for want of memory, say."""
    return isinstance(error, RecipeError | IncompatibleError | NumericalError)
