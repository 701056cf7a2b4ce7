"""What `suite`, `finetune` and `merge --set scale=auto` do once their arguments are read."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from orthomerge.cli.commands import pair, print_tables
from orthomerge.core.table import Table
from orthomerge.errors import RecipeError
from orthomerge.recipe import parse_value
from orthomerge.strict import build

if TYPE_CHECKING:
    from orthomerge.recipe import Recipe
    from orthomerge.suites.suite import Suite

__all__ = [
    "choose_scale",
    "describe_suite",
    "finetune",
    "list_suites",
    "open_suite",
    "say",
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
    columns = ("suite", "what it is", "tasks", "needs")
    rows = ((row.name, row.title, len(row.tasks), row.needs) for row in SUITES.values())
    print_tables([Table.of("", columns, rows, left=4, wrap=("what it is", "needs"))])


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
    columns = ("classes", "train", "val", "test")
    counts = ((name, *(str(row.get(column, "")) for column in columns)) for name, row in rows.items())
    print_tables([Table.of("", ("task", *columns), counts, left=5)])


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

    given = dict(pair(text, "--data TASK=PATH") for text in data)
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
    merge(replace(recipe, experts={task: expert}, vector=None, align=None, **({"parameters": {}} | way)), out=out)
    return out


def _setting(text: str) -> tuple[str, Any]:
    key, value = pair(text, "--set KEY=VALUE")
    return key, parse_value(value)
