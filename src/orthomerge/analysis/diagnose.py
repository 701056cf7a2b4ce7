"""Diagnose a model with its experts and data: what a merge lost, where, and how much of it can be recovered.

Maps and aligners are fitted to the train split (val if there is none) and measured on test inputs. Every sample of
inputs is drawn from one seed and listed in the facts, as are figures that were left out, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TypeVar

import torch

from orthomerge.alignment.aligners import find_aligner
from orthomerge.analysis.conflict import Conflict
from orthomerge.analysis.detail import Detail, fitting_split, limited
from orthomerge.analysis.diagnosis import Diagnosis
from orthomerge.analysis.families import TaskComparison, accuracy_figure, compare_task, family_figures, mean_accuracy
from orthomerge.analysis.figures import Figure, Points
from orthomerge.analysis.geometry import geometry_figures
from orthomerge.analysis.layers import layer_figures
from orthomerge.analysis.points import LEAST, points_figure
from orthomerge.analysis.recorded import (
    fit_figures,
    recorded_base,
    recorded_name,
    recorded_witnesses,
    scale_figure,
    shots_figure,
    start_masking,
)
from orthomerge.analysis.recovery import Hits
from orthomerge.analysis.verdict import Case, Witness, verdict
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
        """Return features of one split by the model and by the expert."""
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
    base = _base(setting) if experts.has_base else recorded_base(records, tuple(tasks))
    correct = _by_name({name: comparison.hits for name, comparison in comparisons.items()})
    case = replace(
        _case(setting, comparisons, correct),
        base=base,
        witnesses=(*recorded_witnesses(records, tuple(tasks), model=model.digest), *_probe(comparisons)),
        conflict=conflict,
        scales={} if search is None else search.means,
        commands=commands or {},
    )
    split = fitting_split(next(iter(tasks.values())))
    fitted = f"{split} inputs (maps: at most {detail.maps} per task)"
    figures: list[Figure | None] = [
        accuracy_figure(correct, base),
        *points,
        *family_figures(case.families, case.expert, fitted=fitted),
        *geometry_figures({name: comparison.geometry for name, comparison in comparisons.items()}, fitted=split),
        *layers,
        *vector_figures,
        None if search is None else scale_figure(search),
        shots_figure(records, method=recorded_name(records, model.title, model=model.digest)),
        *fit_figures(model.origin.facts),
    ]
    facts = {
        **asdict(detail),
        "fitted_on": split,
        "inputs": {name: {"aligner": one.fitted, "maps": one.mapped} for name, one in comparisons.items()},
        "access": model.origin.access,
        "left_out": setting.left_out,
        "versions": {"orthomerge": VERSION, "torch": torch.__version__},
    }
    measured = tuple(figure for figure in figures if figure is not None)
    return Diagnosis(model.title, tuple(tasks), verdict(case), measured, facts)


def _setting(
    model: Model, experts: Experts, tasks: Mapping[str, Task], detail: Detail, how: Encoding, progress: Progress
) -> _Setting:
    """Check and limit the tasks, and encode them with the model."""
    for name in tasks:
        if name not in experts.tasks:
            raise RecipeError(f"task {name!r} needs its expert, which was not given; {nearest(name, experts.tasks)}")
    splits = {name: fitting_split(task) for name, task in tasks.items()}
    tasks = {name: limited(task, most=detail.limit, seed=detail.seed) for name, task in tasks.items()}
    encoded = EncodedTasks(tasks, {name: experts.teacher(name) for name in tasks}, how, progress)
    for name, split in splits.items():
        encoded.features(model, name, split)
        encoded.features(model, name, "test")
    return _Setting(model, experts, encoded, detail)


def _case(
    setting: _Setting, comparisons: Mapping[str, TaskComparison], correct: Mapping[str, Mapping[str, Hits]]
) -> Case:
    """Gather the evidence of a verdict. `correct`: hits by classifier and task."""
    origin, detail, method = setting.model.origin, setting.detail, setting.model.origin.facts["method"]
    # The curve over scales belongs to task arithmetic; scales of other methods are not comparable.
    scale = method["parameters"].get("scale") if method["name"] == "task_arithmetic" else None
    return Case(
        setting.model.title,
        detail.aligner,
        correct["expert"],
        correct["merged"],
        correct["aligned"],
        _by_name({name: comparison.readings for name, comparison in comparisons.items()}),
        per_class=min(comparison.fitted / len(comparison.head.labels) for comparison in comparisons.values()),
        free=not find_aligner(detail.aligner).extra,
        access=origin.access,
        scale=float(scale) if isinstance(scale, int | float) else None,
        seed=detail.seed,
    )


def _layers(setting: _Setting) -> tuple[Figure, ...]:
    """Return figures of CKA by layer, if requested and if there are enough inputs."""
    encoded, detail = setting.encoded, setting.detail
    if not detail.layers:
        return ()
    encoded.progress.stage("encoding layer by layer", None)
    figures = layer_figures(setting.model, encoded.teachers, encoded.tasks, detail=detail, how=encoded.how)
    if isinstance(figures, str):
        setting.left_out["CKA"] = figures
        return ()
    return figures


def _compare_tasks(setting: _Setting) -> tuple[dict[str, TaskComparison], list[Points]]:
    """Compare features task by task, and embed them by t-SNE."""
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
    """Embed one task by t-SNE, if requested and if there are enough inputs."""
    if not setting.detail.points:
        return
    if len(test.merged) < LEAST:
        setting.left_out[f"t-SNE of {task.name}"] = f"{len(test.merged)} test inputs are fewer than {LEAST}"
        return
    among = tuple(setting.encoded.tasks)
    room = _IMAGES // len(among)
    figure = points_figure(task, test, comparison, among=among, detail=setting.detail, image_bytes=room)
    if task.modality == "image" and not figure.images:
        setting.left_out[f"pictures of {task.name}"] = "too many or too large to be embedded"
    yield figure


def _compare_vectors(setting: _Setting) -> tuple[Conflict | None, tuple[Figure, ...]]:
    """Compare task vectors, and measure the mask of a model that was fitted with one."""
    model, experts = setting.model, setting.experts
    if not experts.has_base:
        setting.left_out["task vectors"] = "the base was not given"
        return None, ()
    setting.encoded.progress.stage("comparing task vectors", None)
    vectors = task_vectors(experts, order=model.weights.specs)
    conflict = Conflict.of(TaskVectors({task: vectors.vectors[task] for task in setting.encoded.tasks}))
    figures: list[Figure] = [*conflict.figures()]
    if "fit" in model.origin.facts:
        masking = start_masking(model.origin.facts, model.tasks, model.weights, vectors)
        if isinstance(masking, str):
            setting.left_out["masking rate"] = masking
        else:
            figures.append(masking.figure())
    return conflict, tuple(figures)


def _base(setting: _Setting) -> dict[str, Hits]:
    """Return the hits of the base with the experts' heads."""
    encoded, correct = setting.encoded, {}
    base = setting.experts.base.with_heads(setting.experts.heads)
    for task in setting.encoded.tasks:
        kind = head_of(base.head(task)).kind
        correct[task] = hits(encoded.predictions(base, task, "test"), encoded.labels(task, "test"), kind).numpy()
        encoded.keep([])
    return correct


def _probe(comparisons: Mapping[str, TaskComparison]) -> tuple[Witness, ...]:
    """Return the probes of all tasks as one witness; nothing if a task has none."""
    if not all("probe" in comparison.hits for comparison in comparisons.values()):
        return ()
    name = f"linear probe, {min(comparison.probed for comparison in comparisons.values())} inputs"
    return (Witness(name, *mean_accuracy([comparison.hits["probe"] for comparison in comparisons.values()])),)


def _by_name(by_task: Mapping[str, Mapping[str, Value]]) -> dict[str, dict[str, Value]]:
    """Regroup values by name, then task; names that a task lacks are left out."""
    names = [name for name in next(iter(by_task.values())) if all(name in values for values in by_task.values())]
    return {name: {task: values[name] for task, values in by_task.items()} for name in names}
