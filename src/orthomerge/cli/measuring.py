"""What `suite`, `finetune` and `merge --set scale=auto` do once their arguments are read."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from orthomerge.cli.printing import pair, print_tables
from orthomerge.core.schema import build
from orthomerge.core.table import Table
from orthomerge.runs.recipe import parse_value

if TYPE_CHECKING:
    from orthomerge.suites.suite import Suite


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
            "expert": str(suite.paths.get(name, "")),
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
    from orthomerge.data.reading import read_task
    from orthomerge.files.opening import locate
    from orthomerge.models.processors import load_processor
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
        inputs=[path for text in (data, *others) if (path := Path(text).expanduser()).exists()],
    )
    if as_json:
        typer.echo(json.dumps({"out": out, "metrics": metrics}))
    else:
        typer.echo(f"wrote {out}: " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))


def _setting(text: str) -> tuple[str, Any]:
    key, value = pair(text, "--set KEY=VALUE")
    return key, parse_value(value)
