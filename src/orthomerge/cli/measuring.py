"""What `suite`, `finetune` and `evaluate` do once their arguments are read."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from orthomerge.errors import RecipeError, nearest
from orthomerge.recipe import parse_value
from orthomerge.strict import build

if TYPE_CHECKING:
    from orthomerge.evaluation.evaluate import Bench, Question, Subject
    from orthomerge.recipe import Recipe
    from orthomerge.records import Record
    from orthomerge.suites.suite import Suite

__all__ = [
    "choose_scale",
    "describe_suite",
    "evaluate",
    "finetune",
    "list_suites",
    "open_suite",
    "print_records",
    "show_suite",
]


def say(text: str) -> None:
    """Progress, on standard error."""
    sys.stderr.write(f"{text}\n")


def list_suites(*, as_json: bool) -> None:
    from orthomerge.suites.table import SUITES

    if as_json:
        typer.echo(json.dumps([asdict(row) for row in SUITES.values()], indent=2))
        return
    table = Table("suite", "what it is", "tasks", "needs", box=None, pad_edge=False)
    for row in SUITES.values():
        table.add_row(row.name, row.title, str(len(row.tasks)), row.needs)
    Console(highlight=False).print(table)


def describe_suite(name: str, *, as_json: bool) -> None:
    from orthomerge.suites.table import find_suite

    row = find_suite(name)
    if as_json:
        typer.echo(json.dumps(asdict(row), indent=2))
    else:
        typer.echo(f"{row.name}: {row.title}\ntasks: {', '.join(row.tasks)}\nneeds: {row.needs}")


def show_suite(suite: Suite, *, as_json: bool) -> None:
    rows = {
        name: {
            "classes": len(task.labels),
            **{split: len(examples) for split, examples in task.splits.items()},
            "expert": str(suite.experts.get(name, "")),
        }
        for name, task in suite.tasks.items()
    }
    if as_json:
        typer.echo(json.dumps({"suite": suite.name, "folder": str(suite.folder), "tasks": rows}, indent=2))
        return
    typer.echo(f"{suite.name} in {suite.folder}, base {suite.base}")
    table = Table("task", "classes", "train", "val", "test", box=None, pad_edge=False)
    for name, row in rows.items():
        table.add_row(name, *(str(row.get(column, "")) for column in ("classes", "train", "val", "test")))
    Console(highlight=False).print(table)


def open_suite(name: str, *, folder: str | None, data: str | None, base: str | None, device: str) -> Suite:
    """Build a suite, or find it built."""
    from orthomerge.suites.suite import suite_root
    from orthomerge.suites.table import build_suite

    place = Path(folder) if folder else suite_root() / name
    return build_suite(name, folder=place, data=Path(data) if data else None, base=base, device=device, say=say)


def finetune(
    *, base: str, data: str, out: str, settings: list[str], others: list[str], force: bool, as_json: bool, quiet: bool
) -> None:
    from orthomerge.checkpoints.opening import locate
    from orthomerge.data.processing import load_processor
    from orthomerge.data.reading import read_task
    from orthomerge.tuning.finetune import finetune as run
    from orthomerge.tuning.settings import Tuning

    given = dict(_setting(text) for text in settings)
    tuning = build(Tuning, given, where="finetune")
    task = read_task(data)
    folder, _ = locate(base)
    processor = load_processor(folder, modality=task.modality, max_length=tuning.max_length)
    metrics = run(
        task,
        base=folder,
        out=Path(out),
        settings=tuning,
        processor=processor,
        others=[read_task(other)["train"].unlabelled() for other in others],
        progress=None if quiet else lambda report: say(str(report)),
        force=force,
    )
    if as_json:
        typer.echo(json.dumps({"out": out, "metrics": metrics}))
    else:
        typer.echo(f"wrote {out}: " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))


def evaluate(
    *,
    models: list[str],
    data: list[str],
    experts: list[str],
    suite: Suite | None,
    methods: list[str],
    protocols: list[str],
    shots: list[str],
    seeds: int,
    access: list[str],
    out: str,
    device: str,
    batch: int,
    as_json: bool,
) -> None:
    from orthomerge.evaluation.running import run_evaluation

    bench, subjects = (
        _suite_subjects(suite, methods, device, batch)
        if suite
        else _own_subjects(models, data, experts, device, batch, Path(out))
    )
    questions = _questions(protocols, shots, seeds, access)
    records = run_evaluation(bench, subjects, questions, out=Path(out), suite=suite.name if suite else None, say=say)
    if as_json:
        typer.echo(json.dumps([asdict(record) for record in records], indent=2))
    else:
        print_records(records)
        _print_notes(bench)
        typer.echo(f"\nrecords, predictions and the table are in {out}")


def choose_scale(recipe: Recipe, data: list[str], *, quiet: bool) -> Recipe:
    """The recipe with its `scale: auto` replaced by the best on the tasks' validation splits.

    Where these have labels the criterion is accuracy, elsewhere agreement with the experts. Shows the curve.
    """
    from orthomerge.data.labels import match_labels
    from orthomerge.data.processing import load_processor
    from orthomerge.data.reading import read_task
    from orthomerge.evaluation.evaluate import Bench
    from orthomerge.evaluation.scale import search_scale
    from orthomerge.features.cache import FeatureCache
    from orthomerge.merged import load_head

    given = dict(_pair(text, "--data TASK=PATH") for text in data)
    for task in recipe.experts:
        if task not in given:
            raise RecipeError(f"'scale: auto' is chosen on validation data of every task; give --data {task}=PATH")
    with tempfile.TemporaryDirectory(prefix="orthomerge-experts-") as name:
        folder = Path(name)
        teachers = {task: _alone(recipe, task, folder / task) for task in recipe.experts}
        tasks = {
            task: match_labels(replace(read_task(given[task]), name=task), load_head(out / "heads" / task).labels)
            for task, out in teachers.items()
        }
        processor = load_processor(
            next(iter(teachers.values())) / "encoder", modality=next(iter(tasks.values())).modality
        )
        bench = Bench(tasks, processor, teachers=teachers, cache=FeatureCache(folder / "features"))
        labelled = all(task["val"].labels is not None for task in tasks.values())
        search = search_scale(recipe, bench, criterion="accuracy" if labelled else "agreement")
    if not quiet:
        say(f"{search.criterion} on validation data, by scale:\n{search.plot()}")
    return replace(recipe, parameters={**recipe.parameters, "scale": search.best})


def _alone(recipe: Recipe, task: str, out: Path) -> Path:
    """One expert of a recipe, in the form in which everything is evaluated: as the merge of itself."""
    from orthomerge.checkpoints.lora import Adapter
    from orthomerge.checkpoints.opening import open_expert
    from orthomerge.pipeline import merge

    expert = recipe.tasks[task]
    adapter = isinstance(open_expert(expert.path), Adapter)
    way = (
        {"method": "task_arithmetic", "parameters": {"scale": 1.0}} if adapter else {"method": "average", "base": None}
    )
    merge(replace(recipe, experts={task: expert}, vector=None, **({"parameters": {}} | way)), out=out)
    return out


def print_records(records: list[Record]) -> None:
    """One table for each access class."""
    from orthomerge.evaluation.tables import TITLES, lines

    rows = lines(records)
    tasks = list(dict.fromkeys(record.task for record in records))
    console = Console(highlight=False)
    console.width = max(console.width, 50 + sum(len(task) + 2 for task in tasks))  # cut numbers help nobody
    for access, title in TITLES.items():
        chosen = [row for row in rows if row.access == access]
        if not chosen:
            continue
        console.print(f"\n{title}")
        table = Table("method", "protocol", *tasks, "mean", box=None, pad_edge=False)
        for row in chosen:
            spread = "" if row.spread is None else f" ±{row.spread:.1f}"
            cells = (f"{row.values[task]:.1f}" if task in row.values else "" for task in tasks)
            table.add_row(Text(row.method), row.title, *cells, f"{row.mean:.1f}{spread}")
        console.print(table)


def _print_notes(bench: Bench) -> None:
    """What would make a reader doubt the numbers."""
    from orthomerge.evaluation.compare import contamination
    from orthomerge.evaluation.metrics import accuracy, predictions

    for task, splits in bench.tasks.items():
        if task not in bench.teachers or not {"val", "test"} <= set(splits.splits):
            continue
        scores = {}
        for split in ("val", "test"):
            labels = splits[split].labels
            if labels is not None:
                import torch

                scores[split] = accuracy(
                    predictions(bench.teacher(task, cast("Any", split))), torch.tensor(labels, dtype=torch.int64)
                )
        if len(scores) == 2 and (warning := contamination(scores["test"], scores["val"], task=task)):
            typer.echo(f"warning: {warning}")


def _suite_subjects(suite: Suite, methods: list[str], device: str, batch: int) -> tuple[Bench, list[Subject]]:
    from orthomerge.evaluation.evaluate import Bench
    from orthomerge.features.cache import FeatureCache

    references = suite.references()
    bench = Bench(
        suite.tasks,
        suite.processor,
        teachers=references["expert"].models,
        cache=FeatureCache(suite.folder / "features"),
        device=device,
        batch=batch,
    )
    subjects = list(references.values())
    for text in methods:
        name, _, options = text.partition(":")
        subjects.append(suite.merged(name, parse_value(f"{{{options}}}") if options else {}))
    return bench, _told_apart(subjects)


def _own_subjects(
    models: list[str], data: list[str], experts: list[str], device: str, batch: int, out: Path
) -> tuple[Bench, list[Subject]]:
    """Output folders of `merge`, the user's data, and the experts as references and teachers."""
    from orthomerge.data.labels import match_labels
    from orthomerge.data.processing import load_processor
    from orthomerge.data.reading import read_task
    from orthomerge.evaluation.evaluate import Bench, Subject
    from orthomerge.merged import load_head, read_manifest
    from orthomerge.pipeline import merge
    from orthomerge.recipe import Recipe

    if not models or not data:
        raise RecipeError("give a suite, or output folders of `orthomerge merge` and --data TASK=PATH for each task")
    folders = [Path(model) for model in models]
    tasks = {}
    for text in data:
        name, source = _pair(text, "--data TASK=PATH")
        for folder in folders:
            if name not in (known := read_manifest(folder)["heads"]):
                raise RecipeError(f"{folder} has no task {name!r}; {nearest(name, known)}")
        head = load_head(folders[0] / "heads" / name)
        tasks[name] = match_labels(replace(read_task(source), name=name), head.labels)
    modality = next(iter(tasks.values())).modality
    processor = load_processor(folders[0] / "encoder", modality=modality)
    given = dict(_pair(text, "--expert TASK=PATH") for text in experts)
    for task in given:
        if task not in tasks:
            raise RecipeError(f"--expert {task}=... has no --data {task}=...; {nearest(task, tasks)}")
    teachers = {task: out / "experts" / task for task in given}
    for task, path in given.items():
        # The average of one expert is that expert, in the form in which everything is evaluated.
        merge(Recipe(experts={task: path}, method="average"), out=teachers[task], force=True)
    bench = Bench(tasks, processor, teachers=teachers, device=device, batch=batch)
    subjects = [Subject("expert", teachers)] if teachers else []
    for folder in folders:
        method = read_manifest(folder)["method"]
        subjects.append(Subject(method["name"], dict.fromkeys(tasks, folder), method["parameters"]))
    return bench, _told_apart(subjects)


def _told_apart(subjects: list[Subject]) -> list[Subject]:
    """Merges by the same method are called after their folders too."""
    names = [subject.name for subject in subjects]
    return [
        replace(subject, name=f"{subject.name} ({next(iter(subject.models.values())).name})")
        if names.count(subject.name) > 1
        else subject
        for subject in subjects
    ]


def _questions(protocols: list[str], shots: list[str], seeds: int, access: list[str]) -> list[Question]:
    from orthomerge.evaluation.evaluate import Question
    from orthomerge.evaluation.protocols import find_protocol
    from orthomerge.records import Access

    counts = [_shots(text) for text in shots]
    for kind in access:
        if kind not in get_args(Access) or kind == "data-free":
            raise RecipeError(f"unknown access {kind!r}; {nearest(kind, get_args(Access)[1:])}")
    questions = []
    for name in protocols:
        needs = find_protocol(name).needs
        if not needs:
            questions.append(Question(name))
            continue
        questions += [
            Question(name, shots=count, seeds=seeds if count is not None else 1, access=cast(Access, kind))
            for count in counts
            for kind in access
        ]
    return questions


def _shots(text: str) -> int | float | None:
    if text == "all":
        return None
    try:
        count = float(text) if "." in text else int(text)
    except ValueError:
        count = 0
    if count <= 0 or (count > 1 and isinstance(count, float)):
        raise RecipeError(f"--shots must be a whole number a class, a share below 1, or all, got {text!r}")
    return count


def _setting(text: str) -> tuple[str, Any]:
    key, value = _pair(text, "--set KEY=VALUE")
    return key, parse_value(value)


def _pair(text: str, form: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key or not value:
        raise RecipeError(f"expected {form}, got {text!r}")
    return key, value
