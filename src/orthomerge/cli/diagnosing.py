"""The command `diagnose`: parse, call the library, print the verdict."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orthomerge.cli.options import Base, Batch, Device, Folder, Json
from orthomerge.errors import RecipeError

if TYPE_CHECKING:
    from orthomerge.analysis.diagnosis import Diagnosis
    from orthomerge.evaluation.evaluate import Bench, Subject
    from orthomerge.recipe import Recipe

__all__ = ["diagnose", "print_verdict"]


def diagnose(
    model: Annotated[str | None, typer.Argument(metavar="[OUT]", help="An output of `orthomerge merge`.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="TASK=PATH", help="A task's data; repeat. For a suite: its folder."),
    ] = None,
    expert: Annotated[
        list[str] | None, typer.Option("--expert", metavar="TASK=PATH", help="The expert of a task; repeat.")
    ] = None,
    base: Base = None,
    suite: Annotated[str | None, typer.Option("--suite", help="Take experts and data from a suite.")] = None,
    folder: Folder = None,
    method: Annotated[
        str, typer.Option("--method", help="For a suite without OUT: the merge to look at.")
    ] = "task_arithmetic",
    aligner: Annotated[str, typer.Option("--aligner", help="See `orthomerge aligners`.")] = "auto",
    points: Annotated[int, typer.Option("--points", help="Inputs a task for t-SNE; 0 for none.")] = 400,
    layers: Annotated[int, typer.Option("--layers", help="Inputs a task for CKA; 0 for none.")] = 512,
    limit: Annotated[
        int | None, typer.Option("--limit", help="At most so many train inputs a task, for all that is fitted.")
    ] = None,
    scales: Annotated[bool, typer.Option("--scales", help="Also merge at scales from 0.1 to 1 (slow).")] = False,
    seed: Annotated[int, typer.Option("--seed", help="For all that is drawn.")] = 0,
    run: Annotated[
        str, typer.Option("--run", help="The run folder: its records are used, diagnosis.json is written.")
    ] = "runs/evaluation",
    device: Device = "auto",
    batch: Batch = 64,
    as_json: Json = False,
) -> None:
    """Say how much of what a merge lost is misalignment, how much is gone, and who is in whose way."""
    from orthomerge.analysis.diagnosis import FILE, write_diagnosis
    from orthomerge.cli.commands import print_json
    from orthomerge.cli.measuring import say
    from orthomerge.diagnosing import Looks
    from orthomerge.diagnosing import diagnose as look
    from orthomerge.errors import OutputError
    from orthomerge.evaluation.scale import search_scale
    from orthomerge.records import read_records

    looks = Looks(aligner=aligner, points=points, layers=layers, limit=limit, seed=seed)
    place = Path(run)
    records = read_records(place / "records.jsonl") if (place / "records.jsonl").is_file() else []
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write the diagnosis to {run}: {error.strerror}; give another --run") from error
    if suite is not None:
        bench, subject, origin, recipe, commands = _from_suite(
            suite, folder, data, model, method, device, batch, aligner
        )
    else:
        bench, subject, origin, recipe, commands = _own(model, data, expert, base, device, batch, place, aligner)
    search = None
    if scales:
        if recipe is None:
            raise RecipeError("--scales merges anew, which needs the base: give --base too")
        search = search_scale(recipe, bench, grid=[step / 10 for step in range(1, 11)], say=say)
    found = look(bench, subject, base=origin, records=records, looks=looks, search=search, commands=commands, say=say)
    write_diagnosis(place / FILE, found)
    if as_json:
        print_json({"method": found.method, "verdict": [vars(finding) for finding in found.verdict], "run": run})
        return
    print_verdict(found)
    typer.echo(f"{len(found.figures)} figures and their numbers are in {place / FILE}")


_Given = tuple["Bench", "Subject", Path | None, "Recipe | None", dict[str, str]]


def _from_suite(
    name: str,
    folder: str | None,
    data: list[str] | None,
    model: str | None,
    method: str,
    device: str,
    batch: int,
    aligner: str,
) -> _Given:
    from orthomerge.cli.measuring import open_suite
    from orthomerge.cli.scoring import merges_of, output_subject, suite_subjects

    ((chosen, parameters),) = merges_of(name, [method])
    built = open_suite(name, folder=folder, data=data[0] if data else None, base=None, device=device)
    bench, _ = suite_subjects(built, [], device, batch)
    subject = built.merged(chosen, parameters) if model is None else output_subject(Path(model), built.tasks)
    references = built.references()
    given = f"orthomerge evaluate --suite {name}" + (f" --folder {shlex.quote(folder)}" if folder else "")
    commands, told = {}, method if model is None else _told_method(Path(model))
    if told is not None:
        commands["score"] = f"{given} --method {shlex.quote(told)} --aligner {aligner}"
        commands["probe"] = f"{given} --method {shlex.quote(told)} --protocol probe"
    origin = next(iter(references["base"].models.values()))
    return bench, subject, origin, built.recipe("task_arithmetic"), commands


def _told_method(model: Path) -> str | None:
    """How `evaluate --method` names what made an output; None for what it cannot make."""
    from orthomerge.manifest import read_manifest

    manifest = read_manifest(model)
    if "fit" in manifest or "alignment" in manifest:
        return None
    options = ", ".join(f"{key}: {json.dumps(value)}" for key, value in manifest["method"]["parameters"].items())
    name: str = manifest["method"]["name"]
    return f"{name}:{options}" if options else name


def _own(
    model: str | None,
    data: list[str] | None,
    experts: list[str] | None,
    base: str | None,
    device: str,
    batch: int,
    place: Path,
    aligner: str,
) -> _Given:
    from dataclasses import replace

    from orthomerge.cli.commands import pairs
    from orthomerge.cli.scoring import own_subjects
    from orthomerge.manifest import read_manifest
    from orthomerge.pipeline import merge
    from orthomerge.recipe import Recipe

    if model is None or not data or not experts:
        raise RecipeError(
            "give a suite, or an output of `orthomerge merge` with --data TASK=PATH and --expert TASK=PATH of each task"
        )
    given = pairs(experts, "--expert TASK=PATH", "experts")
    for task in pairs(data, "--data TASK=PATH", "tasks"):
        if task not in given:
            raise RecipeError(f"a merge is compared with its experts, and that of {task!r} is missing; give --expert")
    bench, subjects = own_subjects([model], data, experts, device, batch, place)
    told = [f"--data {shlex.quote(text)}" for text in data] + [f"--expert {shlex.quote(text)}" for text in experts]
    where, arguments = shlex.quote(model), " ".join(told)
    out = shlex.quote(model.rstrip("/"))
    commands = {
        "align": f"orthomerge align {where} --aligner {aligner} {arguments} --out {out}-aligned",
        "probe": f"orthomerge evaluate {where} {arguments} --protocol current --protocol probe",
    }
    if base is None:
        return bench, subjects[-1], None, None, commands
    commands["refit"] = (
        f"orthomerge merge --method realign --base {shlex.quote(base)} {arguments} --out {out}-realigned"
    )
    pooling = read_manifest(Path(model))["pooling"]
    recipe = Recipe(experts=dict(given), base=base, method="task_arithmetic", pooling=pooling)
    origin = place / "base"
    merge(replace(recipe, parameters={"scale": 0.0}), out=origin, force=True)
    return bench, subjects[-1], origin, recipe, commands


def print_verdict(found: Diagnosis) -> None:
    """Every finding under its title."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False)
    for finding in found.verdict:
        console.print(Text(finding.title, style="bold"))
        console.print(Padding(Text(finding.text), (0, 0, 1, 2)))
