"""Diagnose a model with its experts and data: what a merge lost, where, and how much of it can be recovered.

Maps and aligners are fitted to the train split (val if there is none) and measured on test inputs. The facts list every
sample of inputs, drawn from one seed, and figures that were left out, with the reason.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import torch

from orthomerge.alignment.aligners import find_aligner
from orthomerge.analysis.conflict import Conflict
from orthomerge.analysis.detail import Detail, fitting_split, sample
from orthomerge.analysis.diagnosis import Diagnosis, Figure, Points
from orthomerge.analysis.families import TaskComparison, accuracy_figure, compare_task, family_figures, mean_accuracy
from orthomerge.analysis.geometry import geometry_figures
from orthomerge.analysis.layers import FEWEST_FOR_CKA, layer_figures
from orthomerge.analysis.points import LEAST, points_figure
from orthomerge.analysis.recorded import (
    fit_figures,
    recorded_name,
    recorded_witnesses,
    scale_figure,
    shots_figure,
)
from orthomerge.analysis.recovery import HitsByTask
from orthomerge.analysis.verdict import Case, verdict
from orthomerge.core.device import fixed_threads
from orthomerge.core.errors import RecipeError, nearest
from orthomerge.core.progress import SILENT, Progress
from orthomerge.core.version import VERSION
from orthomerge.data.task import Split, Task
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.metrics import hits
from orthomerge.evaluation.records import Record
from orthomerge.evaluation.scale import ScaleSearch
from orthomerge.merging.merge import task_vectors
from orthomerge.merging.vectors import TaskVectors
from orthomerge.models.encoding import Encoding
from orthomerge.models.experts import Experts
from orthomerge.models.features import FeaturePair
from orthomerge.models.heads import head_of
from orthomerge.models.model import Model
from orthomerge.models.opening import Expert, Opening

Value = TypeVar("Value")
_IMAGES = 2 << 20  # characters of pictures in a diagnosis


@dataclass(frozen=True, eq=False)
class _Setting:
    """A model, its experts and encoded tasks. `left_out`: reason by figure that could not be measured."""

    model: Model
    experts: Experts
    encoded: EncodedTasks
    detail: Detail
    left_out: dict[str, str] = field(default_factory=dict)

    def pair(self, task: str, split: Split) -> FeaturePair:
        encoded, expert = self.encoded, self.encoded.teacher(task)
        return FeaturePair(encoded.features(self.model, task, split), encoded.features(expert, task, split))


def diagnose(
    model: Model,
    experts: Experts,
    tasks: Mapping[str, Task],
    *,
    detail: Detail | None = None,
    records: Sequence[Record] = (),
    search: ScaleSearch | None = None,
    commands: Mapping[str, str] | None = None,
    how: Encoding | None = None,
    progress: Progress = SILENT,
) -> Diagnosis:
    """Compare a model with its experts on tasks whose labels are in the order of the heads.

    `records`: scores of a run. `search`: scores by scale. `commands`: command lines by kind, see `Case`.
    """
    detail = detail or Detail()
    setting = _setting(model, experts, tasks, detail, how or Encoding(), progress)
    layers = _layers(setting)  # before other experts are run, so that the merged encoder is computed once
    comparisons, points = _compare_tasks(setting)
    conflict, vector_figures = _compare_vectors(setting)
    split = fitting_split(next(iter(tasks.values())))
    correct = _by_name({name: comparison.hits for name, comparison in comparisons.items()})
    if experts.has_base:
        correct["base"] = _base_hits(setting)
    witnesses = recorded_witnesses(records, tuple(tasks), model=model.digest)
    if "probe" in correct:
        fewest = min(comparison.probed for comparison in comparisons.values())
        witnesses[f"linear probe, {fewest} inputs"] = mean_accuracy(list(correct["probe"].values()))
    readings = _by_name({name: comparison.readings for name, comparison in comparisons.items()})
    case = Case(
        model.title,
        detail.aligner,
        correct,
        readings,
        per_class=min(comparison.fitted / len(comparison.head.labels) for comparison in comparisons.values()),
        free=not find_aligner(detail.aligner).extra,
        access=model.origin.access,
        witnesses=witnesses,
        conflict=conflict,
        scales={} if search is None else search.means,
        scale=_scale_of(model),
        commands=commands or {},
        seed=detail.seed,
    )
    figures: list[Figure | None] = [
        accuracy_figure(correct),
        *points,
        *family_figures(readings, correct["expert"], fitted=f"{split} inputs (maps: at most {detail.maps} per task)"),
        *geometry_figures({name: comparison.geometry for name, comparison in comparisons.items()}, fitted=split),
        *layers,
        *vector_figures,
        None if search is None else scale_figure(search),
        shots_figure(records, method=recorded_name(records, model.title, model=model.digest)),
        *fit_figures(model.origin.facts),
    ]
    measured = tuple(figure for figure in figures if figure is not None)
    return Diagnosis(model.title, tuple(tasks), verdict(case), measured, _facts(setting, comparisons, split))


def _setting(
    model: Model, experts: Experts, tasks: Mapping[str, Task], detail: Detail, how: Encoding, progress: Progress
) -> _Setting:
    for name in tasks:
        if name not in experts.tasks:
            raise RecipeError(f"task {name!r} needs its expert, which was not given; {nearest(name, experts.tasks)}")
    limited = {}
    for name, task in tasks.items():
        split = fitting_split(task)
        part = task[split] if detail.limit is None else sample(task[split], most=detail.limit, seed=detail.seed)
        limited[name] = replace(task, splits={**task.splits, split: part})
    encoded = EncodedTasks(limited, {name: experts.teacher(name) for name in tasks}, how, progress)
    for name, task in limited.items():
        encoded.features(model, name, fitting_split(task))
        encoded.features(model, name, "test")
    return _Setting(model, experts, encoded, detail)


def _layers(setting: _Setting) -> tuple[Figure, ...]:
    encoded, detail = setting.encoded, setting.detail
    if not detail.layers:
        return ()
    for name, task in encoded.tasks.items():
        if min(len(task["test"]), detail.layers) < FEWEST_FOR_CKA:
            setting.left_out["CKA"] = f"{name!r} has fewer than {FEWEST_FOR_CKA} test inputs"
            return ()
    encoded.progress.stage("encoding layer by layer", None)
    return layer_figures(setting.model, encoded.teachers, encoded.tasks, detail=detail, how=encoded.how)


def _compare_tasks(setting: _Setting) -> tuple[dict[str, TaskComparison], list[Points]]:
    comparisons, points, encoded = dict[str, TaskComparison](), list[Points](), setting.encoded
    for name, task in encoded.tasks.items():
        support, test = setting.pair(name, fitting_split(task)), setting.pair(name, "test")
        encoded.progress.stage(f"comparing features of {name}", None)
        head = head_of(encoded.classifier(encoded.teacher(name), name))
        classifier = encoded.classifier(setting.model, name)
        with fixed_threads(1):
            comparisons[name] = compare_task(support, test, head=head, classifier=classifier, detail=setting.detail)
            points += _points(setting, task, test, comparisons[name])
        encoded.keep([setting.model])
    return comparisons, points


def _points(setting: _Setting, task: Task, test: FeaturePair, comparison: TaskComparison) -> Iterator[Points]:
    if not setting.detail.points:
        return
    if len(test.merged) < LEAST:
        setting.left_out[f"t-SNE of {task.name}"] = f"{len(test.merged)} test inputs are fewer than {LEAST}"
        return
    among = tuple(setting.encoded.tasks)
    room = _IMAGES // len(among)
    yield points_figure(task, test, comparison, among=among, detail=setting.detail, image_bytes=room)


def _compare_vectors(setting: _Setting) -> tuple[Conflict | None, tuple[Figure, ...]]:
    if not setting.experts.has_base:
        setting.left_out["task vectors"] = "the base was not given"
        return None, ()
    setting.encoded.progress.stage("comparing task vectors", None)
    vectors = task_vectors(setting.experts).vectors
    conflict = Conflict.of(TaskVectors({task: vectors[task] for task in setting.encoded.tasks}))
    return conflict, conflict.figures()


def _base_hits(setting: _Setting) -> HitsByTask:
    encoded, correct = setting.encoded, {}
    base = setting.experts.base.with_heads(setting.experts.heads)
    for task in encoded.tasks:
        kind = head_of(base.head(task)).kind
        correct[task] = hits(encoded.predictions(base, task, "test"), encoded.labels(task, "test"), kind).numpy()
        encoded.keep([])
    return correct


def _scale_of(model: Model) -> float | None:
    """Return the scale of task arithmetic; other methods' scales do not belong to the curve over scales."""
    method = model.origin.facts["method"]
    scale = method["parameters"].get("scale") if method["name"] == "task_arithmetic" else None
    return float(scale) if isinstance(scale, int | float) else None


def _facts(setting: _Setting, comparisons: Mapping[str, TaskComparison], split: Split) -> dict[str, Any]:
    return {
        **asdict(setting.detail),
        "fitted_on": split,
        "inputs": {name: {"aligner": one.fitted, "maps": one.mapped} for name, one in comparisons.items()},
        "access": setting.model.origin.access,
        "left_out": setting.left_out,
        "versions": {"orthomerge": VERSION, "torch": torch.__version__},
    }


def _by_name(by_task: Mapping[str, Mapping[str, Value]]) -> dict[str, Mapping[str, Value]]:
    """Regroup values by name, then task; names that a task lacks are left out."""
    names = [name for name in next(iter(by_task.values())) if all(name in values for values in by_task.values())]
    return {name: {task: values[name] for task, values in by_task.items()} for name in names}


def suggested_commands(
    folder: str,
    data: Mapping[str, str],
    experts: Experts,
    *,
    aligner: str = "auto",
    base: str | None = None,
    moved: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return command lines by kind, see `Case`. `base` and `moved`: new paths of a base and experts that were moved.

    `refit` merges again and so names base and experts; it is left out unless their paths say how to open them.
    """
    model, out = shlex.quote(folder), shlex.quote(folder.rstrip("/"))
    inputs = _options("--data", data)
    paths = ([f"--base {shlex.quote(base)}"] if base is not None else []) + _options("--expert", moved or {})
    sources = " ".join((*inputs, *paths))
    commands = {
        "align": f"orthomerge align {model} --aligner {aligner} {sources} --out {out}-aligned",
        "probe": f"orthomerge evaluate {model} {sources} --protocol current --protocol probe",
    }
    opening, plain = experts.opening, {task: Expert(experts.opening.experts[task].path) for task in data}
    usual = Opening({**opening.experts, **plain}, base=opening.base)
    if opening.base is not None and not experts.live and opening == usual:
        named = [shlex.quote(f"{task}={expert.path}") for task, expert in plain.items()]
        arguments = " ".join((*named, f"--base {shlex.quote(opening.base)}", "--method realign", *inputs))
        commands["refit"] = f"orthomerge merge {arguments} --out {out}-realigned"
    return commands


def _options(flag: str, values: Mapping[str, str]) -> list[str]:
    return [f"{flag} {shlex.quote(f'{name}={value}')}" for name, value in values.items()]
