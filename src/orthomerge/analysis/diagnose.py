"""From a model, its experts and data to a diagnosis: what a merge lost, where, and what of it can be recovered.

Maps and aligners are fitted on the train split (val where there is none) and measured on test inputs. Every sample of
inputs is drawn from one seed and listed in the facts. What cannot be measured is left out, and the facts say why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from orthomerge.alignment.aligners import find_aligner
from orthomerge.analysis.compared import Compared, fitting_split
from orthomerge.analysis.conflict import Conflict, conflict_figures, survey
from orthomerge.analysis.diagnosis import Diagnosis
from orthomerge.analysis.embedding import LEAST
from orthomerge.analysis.encoders import LayerComparison, draw_samples
from orthomerge.analysis.families import family_figures
from orthomerge.analysis.figures import Figure, Points
from orthomerge.analysis.fits import fit_figures
from orthomerge.analysis.geometry import geometry_figures
from orthomerge.analysis.look import Look, look
from orthomerge.analysis.looks import Looks
from orthomerge.analysis.masks import masking_figure, start_masking
from orthomerge.analysis.naming import keyed
from orthomerge.analysis.overview import accuracy_figure
from orthomerge.analysis.points import points_of
from orthomerge.analysis.sensitivity import scale_figure, shots_figure
from orthomerge.analysis.verdict import Case, verdict
from orthomerge.analysis.witnesses import probe_witnesses, recorded_name, recorded_witnesses
from orthomerge.core.progress import SILENT, Progress
from orthomerge.core.version import VERSION
from orthomerge.evaluation.metrics import hits, predict
from orthomerge.evaluation.tables import lines
from orthomerge.merging.merged import task_vectors
from orthomerge.merging.stream import single_threaded
from orthomerge.merging.vectors import TaskVectors
from orthomerge.models.encoding import Encoding
from orthomerge.models.features import FeaturePair

if TYPE_CHECKING:
    from orthomerge.data.task import Split, Task
    from orthomerge.evaluation.records import Record
    from orthomerge.evaluation.scale import ScaleSearch
    from orthomerge.models.experts import Experts
    from orthomerge.models.model import Model


Value = TypeVar("Value")
Hits = NDArray[np.bool_]
_IMAGES = 2 << 20  # characters of pictures in a diagnosis


def diagnose(
    model: Model,
    experts: Experts,
    tasks: Mapping[str, Task],
    *,
    looks: Looks | None = None,
    records: Sequence[Record] = (),
    search: ScaleSearch | None = None,
    commands: Mapping[str, str] | None = None,
    how: Encoding | None = None,
    progress: Progress = SILENT,
) -> Diagnosis:
    """Compare a model with its experts; nothing is written. `tasks`: with labels in the order of the heads.

    `records`: what a run has measured. `search`: scores by scale. `commands`: command lines by kind, see `Case`.
    """
    compared = Compared.of(model, experts, tasks, looks=looks or Looks(), how=how or Encoding(), progress=progress)
    layers = _layers(compared)  # before any expert is run, so that the encoder is computed once
    by_task, points = _looked(compared, layers)
    conflict, weights = _weights(compared)
    return _diagnosis(
        compared,
        by_task,
        points,
        weights=(*(layers.figures() if layers else ()), *weights),
        conflict=conflict,
        records=records,
        search=search,
        commands=commands,
    )


def _layers(compared: Compared) -> LayerComparison | None:
    """The model's hidden states for CKA; None if they are not wanted or there are too few inputs."""
    looks = compared.looks
    if not looks.layers:
        return None
    samples = draw_samples(compared.tasks, most=looks.layers, seed=looks.seed)
    if isinstance(samples, str):
        compared.left_out["CKA"] = samples
        return None
    compared.progress.stage("encoding layer by layer", None)
    return LayerComparison.of(compared.model, samples, how=compared.encoded.how)


def _looked(compared: Compared, layers: LayerComparison | None) -> tuple[dict[str, Look], list[Points]]:
    """Task by task: everything that features show, t-SNE, and the expert's layers."""
    by_task: dict[str, Look] = {}
    points: list[Points] = []
    encoded = compared.encoded
    for task in compared.tasks:
        fitted_on, test = compared.pair(task, fitting_split(compared.tasks[task])), compared.pair(task, "test")
        if layers is not None:
            layers.add(task, encoded.teacher(task))
        compared.progress.stage(f"comparing features of {task}", None)
        with single_threaded():
            by_task[task] = _look(compared, task, fitted_on, test)
            if compared.looks.points:
                points += _points(compared, task, test, by_task[task])
        encoded.keep([compared.model])
    return by_task, points


def _look(compared: Compared, task: str, fitted_on: FeaturePair, test: FeaturePair) -> Look:
    encoded, looks = compared.encoded, compared.looks
    return look(
        fitted_on,
        test,
        head=compared.expert_head(task),
        classifier=encoded.classifier(compared.model, task),
        aligner=looks.aligner,
        most=looks.maps,
        probe=looks.probe,
        seed=looks.seed,
    )


def _points(compared: Compared, task: str, test: FeaturePair, measured: Look) -> list[Points]:
    if len(test.merged) < LEAST:
        compared.left_out[f"t-SNE of {task}"] = f"{len(test.merged)} test inputs are fewer than {LEAST}"
        return []
    tasks = compared.tasks
    points = points_of(
        tasks[task],
        test,
        measured,
        key=keyed("tsne", task, among=tuple(tasks)),
        head=compared.expert_head(task),
        most=compared.looks.points,
        bytes_of_images=_IMAGES // len(tasks),
        seed=compared.looks.seed,
    )
    if tasks[task].modality == "image" and not points.images:
        compared.left_out[f"pictures of {task}"] = "too many or too large to be kept small"
    return [points]


def _weights(compared: Compared) -> tuple[Conflict | None, tuple[Figure, ...]]:
    """What task vectors show and, for a masked merge, the mask."""
    model, experts = compared.model, compared.experts
    if not experts.has_base:
        compared.left_out["task vectors"] = "the base was not given"
        return None, ()
    compared.progress.stage("comparing task vectors", None)
    vectors = task_vectors(experts, order=model.weights.specs)
    conflict = survey(TaskVectors({task: vectors.vectors[task] for task in compared.tasks}))
    figures: tuple[Figure, ...] = conflict_figures(conflict)
    if "fit" in model.origin.facts:
        masking = start_masking(model.origin.facts, model.tasks, model.weights, vectors)
        if isinstance(masking, str):
            compared.left_out["masking rate"] = masking
        else:
            figures = (*figures, masking_figure(masking))
    return conflict, figures


def _base(compared: Compared, records: Sequence[Record]) -> dict[str, Hits] | float | None:
    """The base with the experts' heads: hits, or mean accuracy in percent as recorded."""
    experts, encoded = compared.experts, compared.encoded
    if not experts.has_base:
        current = (line for line in lines(records) if line.method == "base" and line.title == "current")
        return next((line.mean for line in current if set(line.values) == set(compared.tasks)), None)
    base = experts.base.with_heads(experts.heads)
    right = {}
    for task in compared.tasks:
        features = encoded.features(base, task, "test")
        assert features.labels is not None  # noqa: S101 - for mypy: nothing without labels gets so far
        right[task] = hits(predict(encoded.classifier(base, task), features.values), features.labels).numpy()
        encoded.keep([])
    return right


def _diagnosis(
    compared: Compared,
    by_task: Mapping[str, Look],
    points: Sequence[Points],
    *,
    weights: Sequence[Figure],
    conflict: Conflict | None,
    records: Sequence[Record],
    search: ScaleSearch | None,
    commands: Mapping[str, str] | None,
) -> Diagnosis:
    """Verdict and figures from everything that was measured."""
    model, looks, tasks = compared.model, compared.looks, tuple(compared.tasks)
    readings, right = _by_name(by_task, lambda one: one.readings), _by_name(by_task, lambda one: one.hits)
    base = _base(compared, records)
    split = fitting_split(compared.tasks[tasks[0]])
    case = Case(
        model.title,
        looks.aligner,
        right["expert"],
        right["merged"],
        right["aligned"],
        readings,
        per_class=min(one.fitted / len(compared.tasks[task].labels) for task, one in by_task.items()),
        base=base,
        free=not find_aligner(looks.aligner).extra,
        access=model.origin.access,
        witnesses=(*recorded_witnesses(records, tasks, model=model.digest), *probe_witnesses(by_task)),
        conflict=conflict,
        scales={} if search is None else search.means,
        scale=_scale(model),
        commands=commands,
        seed=looks.seed,
    )
    figures: list[Figure | None] = [
        accuracy_figure({**right, **({"base": base} if isinstance(base, dict) else {})}),
        *points,
        *family_figures(readings, case.expert, fitted=f"{split} inputs (maps: at most {looks.maps} of a task)"),
        *geometry_figures({task: one.geometry for task, one in by_task.items()}, fitted=split),
        *weights,
        None if search is None else scale_figure(search),
        shots_figure(records, method=recorded_name(records, model.title, model=model.digest)),
        *fit_figures(model.origin.facts),
    ]
    drawn = tuple(figure for figure in figures if figure is not None)
    return Diagnosis(model.title, tasks, verdict(case), drawn, _facts(compared, by_task, split))


def _facts(compared: Compared, by_task: Mapping[str, Look], split: Split) -> dict[str, Any]:
    return {
        **asdict(compared.looks),
        "fitted_on": split,
        "inputs": {task: {"aligner": one.fitted, "maps": one.mapped} for task, one in by_task.items()},
        "access": compared.model.origin.access,
        "left_out": compared.left_out,
        "versions": {"orthomerge": VERSION, "torch": torch.__version__},
    }


def _by_name(by_task: Mapping[str, Look], part: Callable[[Look], Mapping[str, Value]]) -> dict[str, dict[str, Value]]:
    """What every task has, by its name and then by task."""
    first = next(iter(by_task.values()))
    names = [name for name in part(first) if all(name in part(one) for one in by_task.values())]
    return {name: {task: part(one)[name] for task, one in by_task.items()} for name in names}


def _scale(model: Model) -> object:
    """Where the merge lies on the curve over scales, which is that of task arithmetic."""
    method = model.origin.facts["method"]
    return method["parameters"].get("scale") if method["name"] == "task_arithmetic" else None
