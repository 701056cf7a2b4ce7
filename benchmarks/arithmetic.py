"""Task negation and task analogies on the digits suite, measured as Ilharco et al. (2023, arXiv 2212.04089) do.

    python benchmarks/arithmetic.py [--folder FOLDER] [--seeds N]

Base and experts are kept in FOLDER for the next run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.environments import ROOT, describe_run, table, write_result

from orthomerge.api.open import open as open_experts
from orthomerge.data.task import Examples, Task
from orthomerge.evaluation.editing import (
    Analogy,
    Form,
    Negation,
    analogy_plane,
    base_heads,
    search_analogy,
    search_negation,
)
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.metrics import Score
from orthomerge.evaluation.probe import fit_probe
from orthomerge.evaluation.scale import Span, arithmetic, span_of
from orthomerge.models.encoding import Encoding
from orthomerge.models.experts import Experts
from orthomerge.models.features import FeatureCache
from orthomerge.models.heads import Head
from orthomerge.suites.digits import PROCESSOR, TUNING
from orthomerge.suites.suite import Suite
from orthomerge.suites.table import build_suite
from orthomerge.tuning.finetune import finetune

Say = Callable[[str], None]
Image = np.ndarray[tuple[int, int], np.dtype[np.uint8]]
Change = Callable[[Image], Image]

WHAT = ("digit", "parity", "size", "negative")  # which digit is it?
HOW = ("rotation", "mirrored", "shift")  # how does it lie?
LABELS = ("digit", "parity", "size")
DOMAINS: dict[str, Change] = {
    "negative": lambda image: 255 - image,
    "turned": lambda image: np.ascontiguousarray(image[::-1, ::-1]),
    "mirrored": lambda image: np.ascontiguousarray(image[:, ::-1]),
}
COARSE = (0.25, 0.5, 0.75, 1.0)  # where two coefficients are searched at once

NEGATION = """\
Accuracy in percent on 449 test inputs, with Wilson's 95 % interval where there is room; scales from 0, 0.05 ... 1,
chosen on 180 validation inputs. The paper's models read every task by a frozen head that the base has from the start.
Ours has none, so each task gets a probe on the *base's* features (fitted on the train split), and that head stays:
under it base, fine-tuned, negated and random model are read, and with it frozen the experts were fine-tuned.

The control must be something that the base can do and that is not the target under another name. *digit*, *parity*,
*size* and *negative* all ask which digit it is, *rotation*, *mirrored* and *shift* how it lies: a target's control is
the tasks of the other kind, of whose mean accuracy the chosen model keeps at least 95 % on validation data. *random*: a
random vector, every tensor as long as the task vector's, through the same search, mean of {seeds} seeds. *new probe*: a
probe fitted anew on the features of the base and of the negated model; what it still reads was hidden from the old
head, not forgotten. Gradient ascent, the paper's other control, was not run."""

OTHERWISE = """\
The same with other choices. *all six*: the control is all other tasks, among them those that ask the same of the same
images. *ordinary experts*: the suite's own, fine-tuned together with a head of their own; read by the same probes."""

ANALOGY = """\
A task is a question (digit, parity, size) about plain images or about images of another domain (negative, turned by 180
degrees, mirrored). *y-domain from x* is the analogy x : x-domain :: y : y-domain, a model for a task on which nothing
was fine-tuned: base + lambda tau_C + mu (tau_B - tau_A), read by the head of C. (The base's pre-training has seen such
images, with other questions.)

*base*, *C*: the base, and the expert of C as it is (the paper's auxiliary fine-tuning). *C scaled*: lambda tau_C alone.
*unscaled*: lambda = mu = 1, nothing of D was looked at. *analogy*: lambda = mu, from 0, 0.05 ... 1. *two*: independent
lambda and mu from 0, 0.25 ... 1 (the paper's sentiment experiments have two). *expert*: fine-tuned on D, the ceiling.
Coefficients are chosen on 180 labelled validation inputs of D. Experts were fine-tuned with the head frozen that is a
probe on the base's features of plain images; one seed."""

MEANS = "By the question that B - A comes from; and with ordinary experts, where the head of C is one of its own."


@dataclass(frozen=True)
class Setting:
    """What every measurement needs. `heads`: the probes on the base's features."""

    suite: Suite
    tasks: EncodedTasks
    heads: Mapping[str, Head]
    folder: Path
    say: Say


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "arithmetic")
    parser.add_argument("--seeds", type=int, default=3, help="random vectors for each target (3)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the models are so small that a second thread only gets in the way
    described, started = describe_run(), time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - started:5.0f} s] {text}", flush=True)

    suite = build_suite("digits", folder=arguments.folder / "suite", say=say)
    how = Encoding(FeatureCache(arguments.folder / "features"), "cpu", batch=256, processor=PROCESSOR)
    tasks, experts = EncodedTasks({**suite.tasks, **cells(suite)}, how=how), suite.experts
    base = span_of(arithmetic(experts, {}))
    setting = Setting(suite, tasks, base_heads(base, tasks, experts.heads), arguments.folder, say)
    say("the base's heads are fitted")
    negated, otherwise = negations(setting, arguments.seeds)
    analogies, summary = all_analogies(setting)
    sections = {
        "# Task arithmetic on digits": "Negation and analogy as in Ilharco et al. (2023), on the embedded suite.",
        "## Run": described,
        "## Negation": f"{NEGATION.format(seeds=arguments.seeds)}\n\n{negated}",
        "## Negation otherwise": f"{OTHERWISE}\n\n{otherwise}",
        "## Analogy": f"{ANALOGY}\n\n{analogies}",
        "## Analogy in the mean": f"{MEANS}\n\n{summary}",
    }
    print("\n\n".join(sections.values()))
    say(f"wrote {write_result('arithmetic', sections)}")


def cells(suite: Suite) -> dict[str, Task]:
    """Every question in every domain, LABEL-DOMAIN; plain images are the suite's own."""

    def changed(task: Task, name: str, change: Change) -> Task:
        splits = {
            split: Examples([change(image) for image in part.inputs], part.labels, part.split)
            for split, part in task.splits.items()
        }
        return replace(task, name=name, splits=splits)

    return {
        f"{label}-{domain}": changed(suite.tasks[label], f"{label}-{domain}", change)
        for domain, change in DOMAINS.items()
        for label in LABELS
    }


def frozen(setting: Setting, name: str, head: Head) -> Path:
    """An expert whose head was the base's, and stayed so; made now unless it was before."""
    out = setting.folder / "experts-frozen_head" / name
    return _made(setting, name, out, head)


def ordinary(setting: Setting, name: str) -> Path:
    """An expert with a head of its own: the suite's, or one like it."""
    if name in setting.suite.tasks:
        return setting.suite.folder / "experts" / name
    return _made(setting, name, setting.folder / "experts" / name, None)


def _made(setting: Setting, name: str, out: Path, head: Head | None) -> Path:
    if not (out / "config.json").is_file():
        mode = TUNING if head is None else replace(TUNING, mode="frozen_head")
        metrics = finetune(
            setting.tasks.tasks[name],
            base=setting.suite.base,
            out=out,
            settings=mode,
            processor=PROCESSOR,
            head=head,
            resume=False,
        )
        setting.say(f"expert {name}: val {100 * metrics['val_accuracy']:.1f}")
    return out


def negations(setting: Setting, seeds: int) -> tuple[str, str]:
    """The main table, and that of other choices."""
    rows, others, numbers, other_numbers = [], [], [], []
    for target in setting.suite.tasks:
        kind = HOW if target in WHAT else WHAT
        line = _line(setting, target, frozen(setting, target, setting.heads[target]))
        found = _negation(setting, line, target, kind)
        random = [_negation(setting, line.random(seed=seed), target, kind) for seed in range(seeds)]
        tuned = line.scores((-1.0,), setting.tasks, "test", {target: setting.heads[target]})[target]
        probed = [_new_probe(setting, line, target, scale) for scale in (0.0, found.scale)]
        base, edited = found.base[target], found.edited[target]
        drawn = fmean(result.edited[target].value for result in random)
        kept = fmean(result.kept for result in random)
        numbers.append([base.value, tuned.value, edited.value, found.kept, drawn, kept, *(p.value for p in probed)])
        rows.append([
            target, _interval(base), _percent(tuned.value), _interval(edited), f"{found.scale:g}", _percent(found.kept),
            _percent(drawn), _percent(kept), " to ".join(_percent(p.value) for p in probed),
        ])  # fmt: skip
        setting.say(f"negation of {target}: {rows[-1]}")
        six = _negation(setting, line, target, [task for task in setting.suite.tasks if task != target])
        plain = _negation(setting, _line(setting, target, ordinary(setting, target)), target, kind)
        others.append([target, *_short(six), *_short(plain)])
        other_numbers.append([value for one in (six, plain) for value in (one.edited[target].value, one.kept)])
    mean = [fmean(column) for column in zip(*numbers, strict=True)]
    shown = [_percent(value) for value in mean]
    rows.append(["**mean**", *shown[:3], "", *shown[3:6], " to ".join(shown[6:])])
    six_target, six_kept, plain_target, plain_kept = (
        _percent(fmean(column)) for column in zip(*other_numbers, strict=True)
    )
    others.append(["**mean**", six_target, "", six_kept, plain_target, "", plain_kept])
    header = ["target", "base", "fine-tuned", "negated", "scale", "control kept", "random", "kept", "new probe"]
    other_header = [
        "target", "all six: negated", "scale", "kept", "ordinary experts: negated", "scale", "kept",
    ]  # fmt: skip
    return table(header, rows), table(other_header, others)


def _line(setting: Setting, target: str, expert: Path) -> Span:
    experts = _opened(setting, {target: expert})
    return span_of(arithmetic(experts, {}), arithmetic(experts, {target: -1.0}))


def _opened(setting: Setting, experts: Mapping[str, Path]) -> Experts:
    return open_experts(experts, base=setting.suite.base).check()


def _negation(setting: Setting, line: Span, target: str, controls: Sequence[str]) -> Negation:
    heads = {task: setting.heads[task] for task in (target, *controls)}
    return search_negation(line, heads, setting.tasks, target=target)


def _new_probe(setting: Setting, line: Span, task: str, scale: float) -> Score:
    tasks, old = setting.tasks, setting.heads[task]
    features = tasks.features(line.at(scale), task, "train", reader=old)
    head = fit_probe(features, tasks.tasks[task].labels).reading_as(old)
    return line.scores((scale,), tasks, "test", {task: head})[task]


def _short(found: Negation) -> list[str]:
    return [_percent(found.edited[found.target].value), f"{found.scale:g}", _percent(found.kept)]


def all_analogies(setting: Setting) -> tuple[str, str]:
    """Every analogy of frozen-head experts, and means of these and of ordinary experts."""
    forms = [
        (Form(x, f"{x}-{domain}", y), f"{y}-{domain}") for domain in DOMAINS for y in LABELS for x in LABELS if x != y
    ]
    rows, summary = [], []
    for kind in ("frozen-head", "ordinary"):
        numbers: dict[str, list[list[float]]] = {}
        for form, task in forms:
            cell = _analogy(setting, form, task, kind == "frozen-head")
            for source in ("all", f"from {form.a}"):
                numbers.setdefault(source, []).append(cell.numbers())
            if kind == "frozen-head":
                rows.append(cell.row())
            setting.say(f"{kind} {task} from {form.a}: {' '.join(cell.row()[1:])}")
        for source, found in sorted(numbers.items()):
            means = [_percent(fmean(column)) for column in zip(*found, strict=True)]
            summary.append([kind, source, str(len(found)), *means])
    columns = ["base", "C", "C scaled", "unscaled", "analogy", "two", "expert"]
    return table(["D from", *columns], rows), table(["experts", "B - A", "analogies", *columns], summary)


@dataclass(frozen=True)
class Cell:
    """One analogy: with one coefficient, with two, and C alone through the same search."""

    form: Form
    one: Analogy
    two: Analogy
    alone: Analogy

    def numbers(self) -> list[float]:
        expert = self.one.expert
        assert expert is not None  # there is one of every cell
        scores = (self.one.base, self.one.auxiliary, self.alone.edited, self.one.unscaled, self.one.edited)
        return [score.value for score in (*scores, self.two.edited, expert)]

    def row(self) -> list[str]:
        cells = [_percent(value) for value in self.numbers()]
        cells[2] += f" ({self.alone.best.scale:g})"
        cells[4] = f"{_interval(self.one.edited)} at {self.one.best.scale:g}"
        cells[5] += f" ({self.two.best.scale:g}, {self.two.best.shift:g})"
        return [f"{self.one.task} from {self.form.a}", *cells]


def _analogy(setting: Setting, form: Form, task: str, keep_head: bool) -> Cell:
    def expert(name: str) -> Path:
        label = name.partition("-")[0]
        return frozen(setting, name, setting.heads[label]) if keep_head else ordinary(setting, name)

    experts = _opened(setting, {name: expert(name) for name in (form.a, form.b, form.c, task)})
    tasks, head = replace(setting.tasks, teachers={task: experts.teacher(task)}), experts.heads[form.c]
    plane = analogy_plane(experts, form)
    alone = replace(plane, directions=(plane.directions[0], {}))  # the second changes nothing
    return Cell(
        form,
        search_analogy(plane, head, tasks, task=task),
        search_analogy(plane, head, tasks, task=task, grid=COARSE, independent=True),
        search_analogy(alone, head, tasks, task=task),
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _interval(found: Score) -> str:
    return f"{100 * found.value:.1f} ({100 * found.low:.0f}-{100 * found.high:.0f})"


if __name__ == "__main__":
    main()
