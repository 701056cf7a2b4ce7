"""From models, data and a cache of features to a diagnosis: what a merge lost, where, and what of it can be won back.

Maps and aligners are fitted on the train split (val where there is none) and measured on test inputs. Every choice of
some inputs is drawn from one seed and told in the facts. What cannot be measured is left out, and the facts say why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from orthomerge.alignment.aligners import find_aligner
from orthomerge.analysis.conflict import Conflict, conflict_figures, survey
from orthomerge.analysis.diagnosis import Diagnosis
from orthomerge.analysis.embedding import LEAST, chosen_inputs
from orthomerge.analysis.encoders import cka_figures, encoder_vectors, encoder_weights
from orthomerge.analysis.families import family_figures
from orthomerge.analysis.figures import Figure, Points
from orthomerge.analysis.fits import fit_figures
from orthomerge.analysis.geometry import geometry_figures
from orthomerge.analysis.look import Look, look
from orthomerge.analysis.masks import masking_figure, start_masking
from orthomerge.analysis.naming import keyed
from orthomerge.analysis.overview import accuracy_figure
from orthomerge.analysis.points import points_of
from orthomerge.analysis.sensitivity import scale_figure, shots_figure
from orthomerge.analysis.verdict import Case, verdict
from orthomerge.analysis.witnesses import probe_witnesses, recorded_name, recorded_witnesses
from orthomerge.data.inputs import pick
from orthomerge.data.task import Examples, Split, Task
from orthomerge.errors import RecipeError, nearest
from orthomerge.evaluation.bench import Bench
from orthomerge.evaluation.evaluate import Subject
from orthomerge.evaluation.metrics import hits, predict
from orthomerge.evaluation.scale import ScaleSearch
from orthomerge.evaluation.tables import lines
from orthomerge.features.cache import weights_digest
from orthomerge.features.features import FeaturePair
from orthomerge.manifest import read_manifest
from orthomerge.merging.stream import single_threaded
from orthomerge.records import Record
from orthomerge.version import VERSION

__all__ = ["Looks", "diagnose"]

Hits = NDArray[np.bool_]
Say = Callable[[str], None]
_IMAGES = 2 << 20  # characters of pictures in a diagnosis


@dataclass(frozen=True)
class Looks:
    """How closely to look. `points`: inputs a task for t-SNE; `layers`: for CKA; `maps`: that maps are fitted to.

    0 points or layers leave these figures out. `probe`: read the merged features with labels too, as a second witness.
    `limit`: at most so many inputs a task are fitted to, by whatever; all if it is None.
    """

    aligner: str = "auto"
    points: int = 400
    layers: int = 512
    maps: int = 4096
    probe: bool = True
    limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        find_aligner(self.aligner)
        if min(self.points, self.layers, self.seed) < 0 or min(self.maps, 1 if self.limit is None else self.limit) < 1:
            raise RecipeError("'points', 'layers' and 'seed' must be at least 0, 'maps' and 'limit' at least 1")


def diagnose(
    bench: Bench,
    subject: Subject,
    *,
    base: Path | None = None,
    records: Sequence[Record] = (),
    looks: Looks | None = None,
    search: ScaleSearch | None = None,
    commands: Mapping[str, str] | None = None,
    say: Say = lambda text: None,
) -> Diagnosis:
    """Look at one merge. `base`: the base under the experts' heads, as an output folder; without it nothing can be
    said of task vectors. `records`: what a run has measured. `search`: a curve over scales. `commands`: see `Case`.
    """
    looks, left_out = looks or Looks(), dict[str, str]()
    tasks = _tasks(bench, subject)
    if looks.limit is not None:
        bench = replace(bench, tasks={task: _limited(bench, task, looks.limit, looks.seed) for task in tasks})
    found, points = _looked(bench, subject, tasks, looks, left_out, say)
    layers: tuple[Figure, ...] = ()
    if looks.layers:
        say("comparing layers")
        layers = cka_figures(bench, subject, tasks, most=looks.layers, seed=looks.seed, left_out=left_out)
    conflict, weights = _weights(bench, subject, tasks, base, left_out, say)
    readings = {name: {task: one.readings[name] for task, one in found.items()} for name in _shared(found)}
    right = {name: {task: one.hits[name] for task, one in found.items()} for name in _read_by_all(found)}
    manifest = read_manifest(subject.models[tasks[0]])
    untuned = _base(bench, base, tasks, records)
    digest = weights_digest(subject.models[tasks[0]])
    case = Case(
        subject.name,
        looks.aligner,
        right["expert"],
        right["merged"],
        right["aligned"],
        readings,
        per_class=min(one.fitted / len(bench.tasks[task].labels) for task, one in found.items()),
        base=untuned,
        free=not find_aligner(looks.aligner).extra,
        access=subject.access,
        witnesses=(*recorded_witnesses(records, tasks, model=digest), *probe_witnesses(found)),
        conflict=conflict,
        scales={} if search is None else search.means,
        scale=_scale(manifest),
        commands=commands,
        seed=looks.seed,
    )
    split = _split(bench, tasks[0])
    shots = shots_figure(records, method=recorded_name(records, subject.name, model=digest))
    figures: list[Figure | None] = [
        accuracy_figure({**right, **({"base": untuned} if isinstance(untuned, dict) else {})}),
        *points,
        *family_figures(readings, case.expert, fitted=f"{split} inputs (maps: at most {looks.maps} of a task)"),
        *geometry_figures({task: one.geometry for task, one in found.items()}, fitted=split),
        *layers,
        *weights,
        None if search is None else scale_figure(search),
        shots,
        *fit_figures(manifest),
    ]
    drawn = tuple(figure for figure in figures if figure is not None)
    return Diagnosis(subject.name, tasks, verdict(case), drawn, _facts(subject, found, looks, split, left_out))


def _looked(
    bench: Bench, subject: Subject, tasks: tuple[str, ...], looks: Looks, left_out: dict[str, str], say: Say
) -> tuple[dict[str, Look], list[Points]]:
    """Task by task: all that features tell, and t-SNE."""
    found: dict[str, Look] = {}
    points: list[Points] = []
    for task in tasks:
        say(f"looking at {task}")
        pairs = _pairs(bench, subject.models[task], task)
        with single_threaded():
            found[task] = _look(bench, subject, task, pairs, looks)
            if looks.points:
                points += _points(bench, task, pairs[1], found[task], looks, len(tasks), left_out)
        bench.forget()
    return found, points


def _facts(
    subject: Subject, found: Mapping[str, Look], looks: Looks, split: Split, left_out: dict[str, str]
) -> dict[str, Any]:
    return {
        **asdict(looks),
        "fitted_on": split,
        "inputs": {task: {"aligner": one.fitted, "maps": one.mapped} for task, one in found.items()},
        "access": subject.access,
        "left_out": left_out,
        "versions": {"orthomerge": VERSION, "torch": torch.__version__},
    }


def _tasks(bench: Bench, subject: Subject) -> tuple[str, ...]:
    """The subject's tasks in the bench's order; each needs data and an expert."""
    for task in subject.models:
        if task not in bench.tasks:
            raise RecipeError(f"{subject.name!r} has no data of {task!r}; {nearest(task, bench.tasks)}")
        bench.teacher_of(task)
        _split(bench, task)
    tasks = tuple(task for task in bench.tasks if task in subject.models)
    if not tasks:
        raise RecipeError(f"{subject.name!r} has no task to look at")
    return tasks


def _split(bench: Bench, task: str) -> Split:
    """What maps and heads are fitted on: never what they are measured on."""
    for split in ("train", "val"):
        if len(bench.tasks[task].splits.get(split, ())):
            return split
    raise RecipeError(
        f"a diagnosis fits maps to inputs that it does not measure them on, and {task!r} has a test split alone; "
        "give a train or val split too (no labels are needed)"
    )


def _limited(bench: Bench, task: str, most: int, seed: int) -> Task:
    """The task with fewer inputs to fit to, classes in their shares where they are known."""
    split, given = _split(bench, task), bench.tasks[task]
    examples = given[split]
    places = chosen_inputs(examples.labels, len(examples), most=most, seed=seed)
    labels = None if examples.labels is None else examples.labels[places]
    return replace(given, splits={**given.splits, split: Examples(pick(examples.inputs, places), labels, split)})


def _pairs(bench: Bench, model: Path, task: str) -> tuple[FeaturePair, FeaturePair]:
    """Of the split that is fitted on, and of the test split."""
    expert = bench.teacher_of(task)

    def pair(split: Split) -> FeaturePair:
        return FeaturePair(bench.features(model, task, split), bench.features(expert, task, split))

    return pair(_split(bench, task)), pair("test")


def _look(bench: Bench, subject: Subject, task: str, pairs: tuple[FeaturePair, FeaturePair], looks: Looks) -> Look:
    return look(
        *pairs,
        head=bench.head(bench.teacher_of(task), task),
        classifier=bench.classifier(subject.models[task], task),
        aligner=looks.aligner,
        most=looks.maps,
        probe=looks.probe,
        seed=looks.seed,
    )


def _points(
    bench: Bench, task: str, test: FeaturePair, found: Look, looks: Looks, count: int, left_out: dict[str, str]
) -> list[Points]:
    if len(test.merged) < LEAST:
        left_out[f"t-SNE of {task}"] = f"{len(test.merged)} test inputs are fewer than {LEAST}"
        return []
    key = keyed("tsne", task, among=tuple(bench.tasks))
    head = bench.head(bench.teacher_of(task), task)
    given: dict[str, Any] = {"most": looks.points, "bytes_of_images": _IMAGES // count, "seed": looks.seed}
    points = points_of(bench.tasks[task], test, found, key=key, head=head, **given)
    if bench.tasks[task].modality == "image" and not points.images:
        left_out[f"pictures of {task}"] = "too many or too large to be kept small"
    return [points]


def _weights(
    bench: Bench, subject: Subject, tasks: tuple[str, ...], base: Path | None, left_out: dict[str, str], say: Say
) -> tuple[Conflict | None, tuple[Figure, ...]]:
    """What task vectors and, of a masked merge, the mask tell."""
    if base is None:
        left_out["task vectors"] = "the base was not given"
        return None, ()
    say("comparing task vectors")
    vectors = encoder_vectors(base, {task: bench.teacher_of(task) for task in tasks})
    conflict = survey(vectors)
    figures: tuple[Figure, ...] = conflict_figures(conflict)
    folder = subject.models[tasks[0]]
    manifest = read_manifest(folder)
    if "fit" in manifest:
        masking = start_masking(manifest, encoder_weights(folder), vectors)
        if isinstance(masking, str):
            left_out["masking rate"] = masking
        else:
            figures = (*figures, masking_figure(masking))
    return conflict, figures


def _shared(found: Mapping[str, Look]) -> list[str]:
    """Readings that every task has, in order."""
    first, *rest = found.values()
    return [name for name in first.readings if all(name in one.readings for one in rest)]


def _read_by_all(found: Mapping[str, Look]) -> list[str]:
    first, *rest = found.values()
    return [name for name in first.hits if all(name in one.hits for one in rest)]


def _scale(manifest: Mapping[str, Any]) -> object:
    """Where the merge lies on the curve over scales, which is that of task arithmetic."""
    method = manifest["method"]
    return method["parameters"].get("scale") if method["name"] == "task_arithmetic" else None


def _base(
    bench: Bench, base: Path | None, tasks: tuple[str, ...], records: Sequence[Record]
) -> dict[str, Hits] | float | None:
    """The base under the experts' heads: hits, or mean accuracy in percent as recorded."""
    if base is None:
        current = (line for line in lines(records) if line.method == "base" and line.title == "current")
        return next((line.mean for line in current if set(line.values) == set(tasks)), None)
    found = {}
    for task in tasks:
        features = bench.features(base, task, "test")
        assert features.labels is not None  # noqa: S101 - for mypy: nothing without labels gets so far
        found[task] = hits(predict(bench.classifier(base, task), features.values), features.labels).numpy()
        bench.forget()
    return found
