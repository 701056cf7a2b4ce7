"""The command `diagnose`: parse, call the library, print the verdict."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orthomerge.cli.options import Base, Batch, Device, Folder, Json
from orthomerge.core.errors import RecipeError

if TYPE_CHECKING:
    from orthomerge.analysis.diagnosis import Diagnosis
    from orthomerge.models.encoding import Encoding
    from orthomerge.models.experts import Experts
    from orthomerge.models.model import Model


def diagnose(
    model: Annotated[str | None, typer.Argument(metavar="[OUT]", help="An output of `orthomerge merge`.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="TASK=PATH", help="A task's data; repeat. For a suite: its folder."),
    ] = None,
    expert: Annotated[
        list[str] | None,
        typer.Option("--expert", metavar="TASK=PATH", help="Where an expert is now, if it was moved; repeat."),
    ] = None,
    base: Base = None,
    suite: Annotated[str | None, typer.Option("--suite", help="Take experts and data from a suite.")] = None,
    folder: Folder = None,
    method: Annotated[
        str, typer.Option("--method", help="For a suite without OUT: the merge to look at.")
    ] = "task_arithmetic",
    aligner: Annotated[str, typer.Option("--aligner", help="See `orthomerge aligners`.")] = "auto",
    points: Annotated[int, typer.Option("--points", help="Inputs per task for t-SNE; 0 for none.")] = 400,
    layers: Annotated[int, typer.Option("--layers", help="Inputs per task for CKA; 0 for none.")] = 512,
    limit: Annotated[
        int | None, typer.Option("--limit", help="At most so many train inputs per task, for all that is fitted.")
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
    from orthomerge.analysis.detail import Detail
    from orthomerge.analysis.diagnosis import FILE, write_diagnosis
    from orthomerge.api.diagnose import diagnose as compare
    from orthomerge.cli.printing import print_json
    from orthomerge.cli.progress import shown
    from orthomerge.core.errors import OutputError
    from orthomerge.evaluation.records import read_records
    from orthomerge.evaluation.scale import search_scale
    from orthomerge.files.run_folder import check_claim, claim

    detail = Detail(aligner=aligner, points=points, layers=layers, limit=limit, seed=seed)
    place = Path(run)
    check_claim(place, [FILE])
    records = read_records(place / "records.jsonl") if (place / "records.jsonl").is_file() else []
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write the diagnosis to {run}: {error.strerror}; give another --run") from error
    if suite is not None:
        request = _from_suite(suite, folder, data, model, method, device, batch, aligner)
    else:
        request = _own(model, data or [], expert or [], base, device, batch, aligner)
    if scales and not request.experts.has_base:
        raise RecipeError("--scales merges anew, which needs the base: give --base too")
    with shown(quiet=as_json) as progress:
        search = None
        if scales:
            search = search_scale(
                request.experts,
                "task_arithmetic",
                request.data,
                grid=[step / 10 for step in range(1, 11)],
                criterion="accuracy",
                encoding=request.encoding,
                progress=progress,
            )
        diagnosis = compare(
            request.model,
            request.data,
            experts=request.experts,
            detail=detail,
            records=records,
            search=search,
            commands=request.commands,
            encoding=request.encoding,
            progress=progress,
        )
    claim(place, [FILE])
    write_diagnosis(place / FILE, diagnosis)
    if as_json:
        verdict = [vars(finding) for finding in diagnosis.verdict]
        print_json({"method": diagnosis.method, "verdict": verdict, "run": run})
        return
    print_verdict(diagnosis)
    typer.echo(f"{len(diagnosis.figures)} figures and their numbers are in {place / FILE}")


@dataclass(frozen=True, eq=False)
class _Request:
    """What is diagnosed, from the command line."""

    model: Model
    experts: Experts
    data: dict[str, Any]
    encoding: Encoding
    commands: dict[str, str] = field(default_factory=dict)


def _from_suite(
    name: str,
    folder: str | None,
    data: list[str] | None,
    path: str | None,
    method: str,
    device: str,
    batch: int,
    aligner: str,
) -> _Request:
    """A suite's own merge, or an output whose experts are the suite's."""
    from orthomerge.api.load import load
    from orthomerge.cli.evaluate import merges_of
    from orthomerge.cli.measuring import open_suite

    ((chosen, options),) = merges_of(name, [method])
    suite = open_suite(name, folder=folder, data=data[0] if data else None, base=None, device=device)
    model = suite.merged(chosen, options) if path is None else load(path)
    call = f"orthomerge evaluate --suite {name}" + (f" --folder {shlex.quote(folder)}" if folder else "")
    commands, text = {}, method if path is None else _method_text(model)
    if text is not None:
        commands["score"] = f"{call} --method {shlex.quote(text)} --aligner {aligner}"
        commands["probe"] = f"{call} --method {shlex.quote(text)} --protocol probe"
    return _Request(model, suite.experts(), dict(suite.tasks), suite.encoding(device, batch=batch), commands)


def _method_text(model: Model) -> str | None:
    """How `evaluate --method` names what made a model; None for what it cannot make."""
    facts = model.origin.facts
    if "fit" in facts or "alignment" in facts:
        return None
    options = ", ".join(f"{key}: {json.dumps(value)}" for key, value in facts["method"]["parameters"].items())
    name: str = facts["method"]["name"]
    return f"{name}:{options}" if options else name


def _own(
    path: str | None,
    data: list[str],
    experts: list[str],
    base: str | None,
    device: str,
    batch: int,
    aligner: str,
) -> _Request:
    """An output of ours with the user's data; its experts are opened again."""
    from orthomerge.analysis.commands import suggested_commands
    from orthomerge.api.load import resolve
    from orthomerge.cli.printing import pairs
    from orthomerge.models.encoding import Encoding
    from orthomerge.models.experts import reopen_experts

    if path is None or not data:
        raise RecipeError("give a suite, or an output of `orthomerge merge` with --data TASK=PATH of each task")
    sources, moved = pairs(data, "--data TASK=PATH", "tasks"), pairs(experts, "--expert TASK=PATH", "experts")
    model, folder = resolve(path)
    for task in sources:
        model.head(task)
    tasks = [task for task in model.tasks if task in sources]
    opened = reopen_experts(model, folder=folder, base=base, experts=moved, tasks=tasks)
    commands = suggested_commands(path, sources, opened, aligner=aligner, base=base, moved=moved)
    return _Request(model, opened, dict(sources), Encoding(device=device, batch=batch), commands)


def print_verdict(diagnosis: Diagnosis) -> None:
    """Every finding under its title."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False)
    for finding in diagnosis.verdict:
        console.print(Text(finding.title, style="bold"))
        console.print(Padding(Text(finding.text), (0, 0, 1, 2)))
