"""The command `evaluate`: parse, call the library, print the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from orthomerge.cli.options import Base, Device, Folder, Json
from orthomerge.cli.printing import pair, print_json, print_tables
from orthomerge.core.errors import RecipeError, nearest

if TYPE_CHECKING:
    from orthomerge.evaluation.protocols import EvaluationProtocol
    from orthomerge.evaluation.scores import Scores


_REFERENCES = ("base", "expert", "mtl")
Merges = Sequence[tuple[str, dict[str, Any]]]


def evaluate(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[OUT]...", help="Outputs of `orthomerge merge`.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="TASK=PATH", help="A task's data; repeat. For a suite: its folder."),
    ] = None,
    expert: Annotated[
        list[str] | None,
        typer.Option("--expert", metavar="TASK=PATH", help="Score the expert too, which is here now; repeat."),
    ] = None,
    base: Base = None,
    suite: Annotated[str | None, typer.Option("--suite", help="Evaluate merges of a suite's experts instead.")] = None,
    folder: Folder = None,
    method: Annotated[
        list[str] | None, typer.Option("--method", help="For a suite, e.g. ties or 'ties:density: 0.3'; repeat.")
    ] = None,
    protocol: Annotated[
        list[str] | None, typer.Option("--protocol", help="current, knn, aligned-c, probe; repeat.")
    ] = None,
    aligner: Annotated[
        list[str] | None, typer.Option("--aligner", help="Score with aligned heads too (see `aligners`); repeat.")
    ] = None,
    shots: Annotated[
        list[str] | None, typer.Option("--shots", help="Inputs per class, a share (0.1), or all; repeat.")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="Draws of few shots.")] = 5,
    access: Annotated[list[str] | None, typer.Option("--access", help="inductive, transductive; repeat.")] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="NAME", help="Compare every method with this one; else with the best."),
    ] = None,
    margin: Annotated[
        float, typer.Option("--margin", help="Points below which two methods may be called comparable.")
    ] = 1.0,
    out: Annotated[str, typer.Option("--out", help="The run folder.")] = "runs/evaluation",
    device: Device = "auto",
    batch: Annotated[int, typer.Option("--batch")] = 64,
    as_json: Json = False,
) -> None:
    """Score merged models under the papers' protocols, with what each number has seen, and compare them."""
    from orthomerge.cli.progress import shown
    from orthomerge.evaluation.scores import check_run

    if not margin > 0:
        raise RecipeError(f"--margin must be a positive number of points, got {margin:g}")
    protocols = _protocols(
        protocol or ["current", "knn", "aligned-c"], aligner or [], shots or ["all"], seeds, access or ["inductive"]
    )
    check_run(Path(out))
    common: dict[str, Any] = {"protocols": protocols, "against": against, "margin": margin / 100}
    with shown(quiet=as_json) as progress:
        common |= {"progress": progress}
        if suite is None:
            scores = _own(models or [], data or [], expert or [], base, device, batch, common)
        else:
            methods = method or ["average", "task_arithmetic", "ties"]
            scores = _suite(suite, methods, folder, data[0] if data else None, device, batch, common)
        scores.write(out)
    if as_json:
        print_json(scores.as_dict())
        return
    print_tables(scores.tables())
    for note in scores.notes:
        typer.echo(f"\nwarning: {note}")
    typer.echo(f"\nrecords, predictions, comparisons and the tables are in {out}")


def _own(
    models: list[str],
    data: list[str],
    experts: list[str],
    base: str | None,
    device: str,
    batch: int,
    common: dict[str, Any],
) -> Scores:
    """Scores of output folders on the user's data."""
    from orthomerge.api.evaluate import evaluate as score
    from orthomerge.models.encoding import Encoding

    if not models or not data:
        raise RecipeError("give a suite, or output folders of `orthomerge merge` and --data TASK=PATH for each task")
    tasks = dict(pair(text, "--data TASK=PATH") for text in data)
    places = dict(pair(text, "--expert TASK=PATH") for text in experts)
    for task in places:
        if task not in tasks:
            raise RecipeError(f"--expert {task}=... has no --data {task}=...; {nearest(task, tasks)}")
    return score(
        models,
        tasks,
        experts=places or None,
        base=base,
        references=("expert",) if places else (),
        encoding=Encoding(device=device, batch=batch),
        **common,
    )


def _suite(
    name: str,
    methods: list[str],
    folder: str | None,
    data: str | None,
    device: str,
    batch: int,
    common: dict[str, Any],
) -> Scores:
    """Scores of merges of a suite's experts, beside its references."""
    from orthomerge.api.evaluate import evaluate as score
    from orthomerge.cli.measuring import open_suite
    from orthomerge.evaluation.evaluate import Subject, told_apart

    merges = merges_of(name, methods)
    _check_against(common["against"], merges)
    suite = open_suite(name, folder=folder, data=data, base=None, device=device)
    references = suite.references()
    merged = [
        replace(Subject.of(suite.merged(method, options), suite.tasks), parameters=options)
        for method, options in merges
    ]
    return score(
        told_apart([*references.values(), *merged]),
        suite.tasks,
        experts=references["expert"].models,
        suite=name,
        encoding=suite.encoding(device, batch=batch),
        **common,
    )


def merges_of(suite: str, methods: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Methods with their options, all of which must exist."""
    from orthomerge.merging.methods import make_method
    from orthomerge.runs.recipe import parse_value
    from orthomerge.suites.table import find_suite

    tasks, merges = find_suite(suite).tasks, []
    for text in methods:
        name, _, options = text.partition(":")
        parameters = parse_value(f"{{{options}}}") if options else {}
        make_method(name, parameters, tasks=tasks)
        merges.append((name, parameters))
    return merges


def _check_against(against: str | None, merges: Merges) -> None:
    """The name must be one that a model will have."""
    from orthomerge.evaluation.evaluate import Subject, told_apart

    merged = told_apart([Subject(name, {}, parameters) for name, parameters in merges])
    names = [*_REFERENCES, *(subject.name for subject in merged)]
    if against is not None and against not in names:
        raise RecipeError(f"--against {against}: there is no such method here; {nearest(against, names)}")


def _protocols(
    names: list[str], aligners: list[str], shots: list[str], seeds: int, access: list[str]
) -> list[EvaluationProtocol]:
    from orthomerge.alignment.aligners import find_aligner
    from orthomerge.data.task import Access
    from orthomerge.evaluation.protocols import EvaluationProtocol, find_protocol

    counts = [_shots(text) for text in shots]
    for kind in access:
        if kind not in get_args(Access) or kind == "data-free":
            raise RecipeError(f"unknown access {kind!r}; {nearest(kind, get_args(Access)[1:])}")
    ways = [(name, None) for name in names] + [("current", find_aligner(name).name) for name in aligners]
    protocols = []
    for name, aligner in ways:
        if aligner is None and not find_protocol(name).needs:
            protocols.append(EvaluationProtocol(name))
            continue
        for count in counts:
            draws = seeds if count is not None else 1
            protocols += [
                EvaluationProtocol(name, shots=count, seeds=draws, access=cast("Any", kind), aligner=aligner)
                for kind in access
            ]
    return protocols


def _shots(text: str) -> int | float | None:
    if text == "all":
        return None
    try:
        count = float(text) if "." in text else int(text)
    except ValueError:
        count = 0
    if count <= 0 or (count > 1 and isinstance(count, float)):
        raise RecipeError(f"--shots must be a whole number per class, a share below 1, or all, got {text!r}")
    return count
