"""What the gallery shows, measured: a diagnosis of task arithmetic, and what fits on top of it find.

Figures are those of MOMA (Kong et al. 2026, arXiv 2412.13526 v3) and of AdaMerging (Yang et al. 2024, arXiv
2310.02575). Everything fitted sees training inputs alone; everything is scored on test inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from statistics import fmean
from typing import Any

from orthomerge.analysis.detail import Detail, sample
from orthomerge.analysis.diagnosis import Curve, Diagnosis, Figure, Heat, Lines, Points, figure_key
from orthomerge.analysis.recorded import fit_figures
from orthomerge.api.diagnose import diagnose
from orthomerge.core.device import device_of
from orthomerge.core.errors import RecipeError
from orthomerge.data.task import Task
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.evaluate import Subject, evaluate
from orthomerge.evaluation.protocols import EvaluationProtocol
from orthomerge.evaluation.records import Record
from orthomerge.evaluation.scale import ScaleSearch, search_scale
from orthomerge.fitting.fit import fit
from orthomerge.models.encoding import Encoding
from orthomerge.models.model import Model
from orthomerge.suites.suite import Suite

PARTS = ("diagnosis", "scale", "shots", "moma", "realign", "adamerging", "masking")
_LOOKED_AT = {"diagnosis", "scale", "shots"}  # what takes a look at the merge itself
TSNE = {  # few classes and many, easy and hard
    "digits": ("digit", "rotation", "mirrored", "shift"),
    "text8": ("ag_news", "dbpedia14", "trec6", "sst5"),
    "vision8": ("mnist", "fashion_mnist", "gtsrb", "resisc12"),
}
SCALES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 1.0)
DECAYS = (5e-9, 3e-7, 3e-6, 3e-5, 3e-4)  # the paper's first; others until little is left
_SEEN = 4096  # inputs a task that maps and aligners are fitted to
_LOOKS = 20  # at a fit
_FEWEST = 40  # steps of a fit from which it is looked at so often

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """How closely to look. `scale`: of task arithmetic, chosen on validation data if None. `points`: t-SNE inputs.

    `steps`: of every fit. `shots`, `draws`: numbers of inputs a class, and how often each is drawn. `about`: where,
    when and by which command.
    """

    about: str
    scale: float | None = None
    steps: int = 300
    points: int = 300
    layers: int = 256
    limit: int | None = None
    shots: tuple[int, ...] = (1, 2, 5, 10, 20)
    draws: int = 3
    scales: tuple[float, ...] = SCALES
    decays: tuple[float, ...] = DECAYS
    parts: tuple[str, ...] = PARTS
    device: str = "auto"


@dataclass
class _Work:
    """A suite, and what was measured so far."""

    suite: Suite
    plan: Plan
    say: Say
    figures: list[Figure] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def references(self) -> dict[str, Subject]:
        return self.suite.references()

    @cached_property
    def encoding(self) -> Encoding:
        batch = 256 if device_of(self.plan.device).type == "cuda" else 64
        return self.suite.encoding(self.plan.device, batch=batch)

    @cached_property
    def encoded(self) -> EncodedTasks:
        return EncodedTasks(self.suite.tasks, self.references["expert"].models, self.encoding)

    def diagnosis(self, model: Model, detail: Detail, **options: Any) -> Diagnosis:
        experts = self.suite.experts
        return diagnose(model, self.suite.tasks, experts=experts, detail=detail, encoding=self.encoding, **options)

    def fit(self, method: str, options: Mapping[str, Any]) -> Model:
        """A merge fitted to the unlabelled training inputs of all tasks."""
        suite, device = self.suite, self.plan.device
        encoding = suite.encoding(device)
        return fit(suite.experts, method, suite.tasks, options, device=device, encoding=encoding)

    def score(self, subject: Subject) -> float:
        """Mean accuracy of the tasks in percent."""
        scored = evaluate([subject], [EvaluationProtocol("current")], self.encoded, suite=self.suite.name)
        return 100 * fmean(each.record.value for each in scored if each.record.protocol == "current")

    @property
    def text(self) -> bool:
        return next(iter(self.suite.tasks.values())).modality == "text"

    def looks(self) -> int:
        """Steps between two looks at a fit."""
        return max(self.plan.steps // _LOOKS, 1) if self.plan.steps >= _FEWEST else 1


def expected_keys(suite: str, tasks: Sequence[str], parts: Sequence[str] = PARTS) -> list[str]:
    """The keys of all figures, in the order of the pages."""
    shown = [task for task in TSNE.get(suite, tuple(tasks)[:4]) if task in tasks]
    by_part = {
        "diagnosis": [
            "accuracy",
            *(figure_key("tsne", task, among=tuple(tasks)) for task in shown),
            *(f"families-{name}" for name in ("accuracy", "distance", "kl", "by-task")),
            "cosine", "coefficient", "cosine-by-task", "cka-layers", "cka-experts",
            "vector-norms", "vector-cosines", "sign-conflicts", "vector-ranks",
        ],
        "scale": ["scale"],
        "shots": ["shots"],
        "moma": ["moma-cosine", "moma-coefficient", "moma-loss", "masking"],
        "realign": ["realign-loss"],
        "adamerging": ["coefficients"],
        "masking": ["masking-accuracy"],
    }  # fmt: skip
    return [key for part in PARTS if part in parts for key in by_part[part]]


def measure(suite: Suite, plan: Plan, *, say: Say = lambda text: None) -> Diagnosis:
    """All figures of a suite, with the verdict on task arithmetic; `facts` say how and where."""
    if plan.limit is not None:
        suite = replace(suite, tasks={name: _limited(task, plan.limit) for name, task in suite.tasks.items()})
    work = _Work(suite, plan, say)
    search = _search(work)
    scale = plan.scale if plan.scale is not None else search.best if search is not None else 0.3
    model = suite.merged("task_arithmetic", {"scale": scale})
    say(f"task arithmetic at scale {scale:g}")
    records = _records(work, model) if "shots" in plan.parts else []
    drawable = find_spec("sklearn") is not None
    detail = Detail(points=plan.points if drawable else 0, layers=plan.layers, limit=_SEEN)
    if "diagnosis" not in plan.parts:
        detail = replace(detail, points=0, layers=0, probe=False)
    found = Diagnosis(model.title, tuple(suite.tasks), (), (), {"left_out": {}})
    if _LOOKED_AT & set(plan.parts):
        say("comparing the merge with its experts")
        found = work.diagnosis(model, detail, records=records, scales=search or False)
        work.figures += found.figures
    _fits(work, scale)
    wanted = expected_keys(suite.name, found.tasks, plan.parts)
    by_key = {figure.key: _tidy(figure) for figure in work.figures}
    if not drawable and "diagnosis" in plan.parts:
        found.facts["left_out"]["t-SNE"] = "scikit-learn is not installed where this was measured"
    facts = {**found.facts, **work.facts, "suite": suite.name, "scale": scale, "steps": plan.steps, "about": plan.about}
    figures = tuple(by_key[key] for key in wanted if key in by_key)
    return Diagnosis(found.method, found.tasks, found.verdict, figures, facts)


def joined(found: Sequence[Diagnosis]) -> Diagnosis:
    """Parts of one gallery that were measured apart, perhaps side by side."""
    first = found[0]
    for other in found[1:]:
        for name in ("suite", "scale", "steps"):
            one, two = first.facts[name], other.facts[name]
            if one != two:
                raise RecipeError(f"{name!r} is {one} in one part and {two} in another; measure them alike")
    by_key = {figure.key: figure for each in found for figure in each.figures}
    wanted = expected_keys(first.facts["suite"], first.tasks)
    facts: dict[str, Any] = {}
    for each in found:
        for name, value in each.facts.items():
            facts[name] = {**facts.get(name, {}), **value} if isinstance(value, Mapping) else value
    facts["about"] = "\n\n".join(dict.fromkeys(each.facts["about"] for each in found))
    verdict = next((each.verdict for each in found if each.verdict), ())
    return Diagnosis(first.method, first.tasks, verdict, tuple(by_key[key] for key in wanted if key in by_key), facts)


def _limited(task: Task, most: int) -> Task:
    """With at most so many training and validation inputs, classes in their shares; test inputs stay."""
    kept = dict(task.splits)
    for split in ("train", "val"):
        if split in kept:
            kept[split] = sample(kept[split], most=most, seed=0)
    return replace(task, splits=kept)


def _tidy(figure: Figure) -> Figure:
    """As it can be printed: no pictures and texts of inputs, short names, and colours for what is not plain anyway."""
    if isinstance(figure, Points):
        return replace(figure, texts=(), images=())
    if figure.key == "shots" and isinstance(figure, Lines):
        curves = tuple(replace(curve, name=curve.name.removesuffix(" (inductive)")) for curve in figure.curves)
        return replace(figure, curves=curves)
    if figure.key in ("sign-conflicts", "vector-cosines") and isinstance(figure, Heat):
        rows = enumerate(figure.values)
        return replace(figure, values=tuple((*row[:place], math.nan, *row[place + 1 :]) for place, row in rows))
    if figure.key == "cka-layers" and isinstance(figure, Heat):  # the first token says the same before the first layer
        told = [place for place, row in enumerate(figure.values) if not all(map(math.isnan, row))]
        names, values = tuple(figure.rows[place] for place in told), tuple(figure.values[place] for place in told)
        return replace(figure, rows=names, values=values)
    if figure.key == "coefficients" and isinstance(figure, Heat):  # in percent: the colours then span what there is
        percent = tuple(tuple(100 * value for value in row) for row in figure.values)
        return replace(figure, values=percent, unit="coefficient, %")
    return figure


def _search(work: _Work) -> ScaleSearch | None:
    if "scale" not in work.plan.parts:
        return None
    work.say(f"merging at scales {', '.join(map(str, work.plan.scales))}")
    return search_scale(
        work.suite.experts,
        "task_arithmetic",
        work.suite.tasks,
        grid=work.plan.scales,
        criterion="accuracy",
        encoding=work.encoding,
    )


def _records(work: _Work, model: Model) -> list[Record]:
    """Few inputs per class, under the papers' protocols: KNN with labels, Aligned-C, Surgery, and `auto`."""
    plan, subject = work.plan, Subject.of(model, work.suite.tasks)
    protocols = [EvaluationProtocol("current")]
    for count in plan.shots:
        options: dict[str, Any] = {"shots": count, "seeds": plan.draws, "models": (subject.name,), "fewer": True}
        protocols += [EvaluationProtocol(name, **options) for name in ("knn", "aligned-c")]
        protocols += [EvaluationProtocol(aligner=name, **options) for name in ("surgery", "auto")]
    work.say(f"scoring with few inputs per class: {', '.join(map(str, plan.shots))}")
    scored = evaluate([work.references["expert"], subject], protocols, work.encoded, suite=work.suite.name)
    return [each.record for each in scored if each.record.protocol != "joint"]


def _fits(work: _Work, scale: float) -> None:
    plan, start = work.plan, {"start": "task_arithmetic", "options": {"scale": scale}}
    given = {"steps": plan.steps, "look": work.looks()}
    moma = {**given, **start, **({"batch": 24, "map_lr": 5e-4} if work.text else {})}
    if "moma" in plan.parts:
        _moma(work, moma)
    if "realign" in plan.parts:
        model = _fitted(work, "realign", {**given, **start})
        work.figures += _loss_lines("realign", model, "KL from the expert, nats")
    if "adamerging" in plan.parts:
        model = _fitted(work, "adamerging", {**given, "start": scale})
        work.figures += [figure for figure in fit_figures(model.origin.facts) if figure.key == "coefficients"]
    if "masking" in plan.parts:
        work.figures.append(_masking(work, moma, scale))


def _moma(work: _Work, options: Mapping[str, Any]) -> None:
    """Loss, masking rate by layer, and the geometry of what was learned (Figures 6, 8 and 7)."""
    model = _fitted(work, "moma", options)
    work.figures += _loss_lines("moma", model, "distance to the expert's features")
    found = work.diagnosis(model, Detail(points=0, layers=0, probe=False, limit=_SEEN))
    for figure in found.figures:
        if figure.key in ("cosine", "coefficient"):
            work.figures.append(replace(figure, key=f"moma-{figure.key}", title=f"{figure.title}, after MOMA"))
        elif figure.key == "masking":
            work.figures.append(figure)


def _fitted(work: _Work, method: str, options: Mapping[str, Any]) -> Model:
    work.say(f"fitting {method}: {options['steps']} steps")
    model = work.fit(method, options)
    mean = work.score(Subject.of(model, work.suite.tasks))
    work.facts.setdefault("accuracy", {})[method] = round(mean, 2)
    work.say(f"{method}: {mean:.1f} %")
    return model


def _loss_lines(method: str, model: Model, what: str) -> list[Lines]:
    """Training and held-out loss, both in the mean of tasks (training is told as their sum)."""
    rows, count = model.origin.facts["fit"]["curve"], len(model.tasks)
    curves = []
    for name, key, over in (("training", "loss", count), ("held out", "held_out", 1)):
        points = [(float(row["step"]), row[key] / over) for row in rows if key in row]
        if len(points) > 1:
            x, y = zip(*points, strict=True)
            curves.append(Curve(name, x, y))
    caption = (
        "Mean over tasks. Training: mean of the batches since the last look, without penalties. "
        "Held out: a tenth of the training inputs, only looked at."
    )
    return [Lines(f"{method}-loss", f"Loss of {method}", caption, "step", what, tuple(curves))] if curves else []


def _masking(work: _Work, options: Mapping[str, Any], scale: float) -> Lines:
    """MOMA with more and more decay of its mask: how much is masked, and what it scores."""
    suite, plan = work.suite, work.plan
    start = Subject.of(suite.merged("task_arithmetic", {"scale": scale}), suite.tasks)
    flat = {"task arithmetic": work.score(start), "base": work.score(work.references["base"])}
    rows = []
    for decay in plan.decays:
        model = work.fit("moma", {**options, "decay": decay, "look": options["steps"]})
        rate, mean = (
            100 * float(model.origin.facts["fit"]["facts"]["masked"]),
            work.score(Subject.of(model, suite.tasks)),
        )
        rows.append({"decay": decay, "masked": rate, "accuracy": mean})
        work.say(f"moma with decay {decay:g}: {rate:.1f} % masked, {mean:.1f} %")
    work.facts["masking"] = rows
    flat["expert"] = work.score(work.references["expert"])
    return masking_lines([(row["masked"], row["accuracy"]) for row in rows], flat)


def masking_lines(rows: Sequence[tuple[float, float]], flat: Mapping[str, float]) -> Lines:
    """From masking rates and accuracies, both in percent; `flat`: what others score."""
    x, y = zip(*sorted(rows), strict=True)
    ends = (min(x[0], 0.0), max(x[-1], 100.0))
    return Lines(
        "masking-accuracy",
        "Masking rate and accuracy",
        "MOMA fitted with more and more decay of its mask, a point each; mean accuracy of tasks on test inputs. "
        "With everything masked the encoder is the base.",
        "masked, % of the merged vector's elements",
        "accuracy, %",
        (Curve("MOMA", x, y), *(Curve(name, ends, (value, value)) for name, value in flat.items())),
    )
