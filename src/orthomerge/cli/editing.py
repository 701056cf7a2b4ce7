"""The commands `negate` and `analogy`: parse, call the library, print the accuracies."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from orthomerge.cli.options import Base, Batch, Device, Dtype, Experts, Force, Grid, Json, Out, Quiet, RecipePath
from orthomerge.core.table import Table
from orthomerge.errors import RecipeError, nearest

if TYPE_CHECKING:
    from orthomerge.evaluation.analogy import Analogy, Form
    from orthomerge.evaluation.bench import Bench
    from orthomerge.evaluation.metrics import Score
    from orthomerge.evaluation.negation import Negation
    from orthomerge.recipe import Recipe

__all__ = ["Heads", "analogy", "negate"]

Heads = Literal["probe", "expert"]


def negate(
    target: Annotated[str, typer.Option("--target", metavar="TASK", help="Which expert's task to forget.")],
    data: Annotated[
        list[str], typer.Option("--data", metavar="TASK=PATH", help="Labelled data of target and controls; repeat.")
    ],
    recipe: RecipePath = None,
    base: Base = None,
    expert: Experts = None,
    control: Annotated[
        list[str] | None,
        typer.Option("--control", metavar="TASK", help="What to keep; all other tasks with data if not given."),
    ] = None,
    heads: Annotated[
        str, typer.Option("--heads", help="probe (fitted on the base's features) or expert: who reads the tasks.")
    ] = "probe",
    keep: Annotated[float, typer.Option("--keep", help="The share of the base's control accuracy to keep.")] = 0.95,
    grid: Grid = None,
    out: Out = None,
    dtype: Dtype = None,
    device: Device = "auto",
    batch: Batch = 64,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Forget a task: the base minus its task vector, as far as a control allows, beside a random vector."""
    from orthomerge.cli.commands import gather, print_json
    from orthomerge.evaluation.negation import base_heads, negated, negation_span, search_negation
    from orthomerge.evaluation.span import ORIGIN, Span

    if heads not in get_args(Heads):
        raise RecipeError(f"unknown heads {heads!r}; {nearest(heads, get_args(Heads))}")
    request = gather(recipe, base=base, experts=expert, out=out, dtype=dtype, aligning=False)
    given, options = _sources(data), _grid(grid)
    wanted = [target, *(control or (task for task in given if task != target))]
    for task in wanted:
        if task not in given:
            raise RecipeError(f"there is no data of {task!r}; give --data {task}=PATH")
        if heads == "expert" and task not in request.experts:
            raise RecipeError(f"'--heads expert' reads {task!r} by its expert's head; give --expert {task}=PATH")
    _check_out(request, force=force)
    with tempfile.TemporaryDirectory(prefix="orthomerge-negation-") as name:
        span, origin = negation_span(request, target, Path(name)), Path(name) / ORIGIN
        readers = {task: task for task in wanted} if heads == "expert" else {}
        bench = _bench(origin, {task: given[task] for task in wanted}, readers=readers, device=device, batch=batch)
        read_by = (
            {task: bench.head(origin, task) for task in wanted}
            if heads == "expert"
            else base_heads(span, bench, wanted)
        )

        def walk(line: Span, title: str) -> Negation:
            told = _told(title, quiet=quiet or as_json)
            return search_negation(line, bench, read_by, target=target, keep=keep, say=told, **options)

        found = walk(span, f"minus {target}")
        random = walk(span.random(seed=request.seed), "random vector")
    if as_json:
        written = request.out if found.scale else None
        print_json({"heads": heads, "negated": _document(found), "random": _document(random), "out": written})
    else:
        _print_negation(found, random, heads)
    if request.out is not None:
        if found.scale == 0:
            raise RecipeError(
                f"no scale of the grid forgets {target!r} and keeps {keep:.0%} of the control, so {request.out} was "
                "not written; give a finer --grid, or a smaller --keep"
            )
        _write(negated(request, target, found.scale), force=force, as_json=as_json, quiet=quiet)


def analogy(
    of: Annotated[str, typer.Option("--of", metavar="A:B::C", help="A is to B as C is to the task of --data.")],
    data: Annotated[str, typer.Option("--data", metavar="TASK=PATH", help="Labelled validation and test data.")],
    recipe: RecipePath = None,
    base: Base = None,
    expert: Experts = None,
    independent: Annotated[
        bool, typer.Option("--independent", help="A coefficient for C and one for B - A: all pairs of the grid.")
    ] = False,
    grid: Grid = None,
    out: Out = None,
    dtype: Dtype = None,
    device: Device = "auto",
    batch: Batch = 64,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make a model for a task without training data: C + (B - A). An expert of the task itself is the ceiling."""
    from orthomerge.cli.commands import gather, pair, print_json
    from orthomerge.evaluation.analogy import Form, analogy_span, combined, search_analogy
    from orthomerge.evaluation.span import ORIGIN, arithmetic
    from orthomerge.merged import load_head
    from orthomerge.pipeline import merge

    request = gather(recipe, base=base, experts=expert, out=out, dtype=dtype, aligning=False)
    form, options = Form.parse(of), _grid(grid)
    task, source = pair(data, "--data TASK=PATH")
    if task in (form.a, form.b, form.c):
        raise RecipeError(
            f"--data is of the fourth task, and {task!r} is one of the three of {of!r}; give it a new name"
        )
    _check_out(request, force=force)
    with tempfile.TemporaryDirectory(prefix="orthomerge-analogy-") as name:
        span, origin = analogy_span(request, form, Path(name)), Path(name) / ORIGIN
        bench = _bench(origin, {task: source}, readers={task: form.c}, device=device, batch=batch)
        if task in request.experts:
            merge(arithmetic(request, {task: 1.0}), out=Path(name) / "expert")
            bench = replace(bench, teachers={task: Path(name) / "expert"})
        found = search_analogy(
            span,
            bench,
            load_head(origin / "heads" / form.c),
            task=task,
            independent=independent,
            say=_told(of, quiet=quiet or as_json),
            **options,
        )
    unedited = found.best.scale == found.best.shift == 0
    if as_json:
        print_json({**asdict(found), "out": None if unedited else request.out})
    else:
        _print_analogy(found, form)
    if request.out is not None:
        if unedited:
            raise RecipeError(
                f"nothing of the grid is better for {task!r} than the base itself, so {request.out} was not written; "
                "give another --grid, or another analogy"
            )
        edited = combined(request, form, scale=found.best.scale, shift=found.best.shift)
        _write(edited, force=force, as_json=as_json, quiet=quiet)


def _sources(data: list[str]) -> dict[str, str]:
    from orthomerge.cli.commands import pair

    return dict(pair(text, "--data TASK=PATH") for text in data)


def _grid(text: str | None) -> dict[str, Any]:
    """The option `grid`, written `0.1,0.5` and checked before any work; nothing where the default is meant."""
    from orthomerge.evaluation.span import scales
    from orthomerge.recipe import parse_value

    if text is None:
        return {}
    found = parse_value(f"[{text}]")
    scales(found)
    return {"grid": found}


def _told(title: str, *, quiet: bool) -> Callable[[str], None]:
    from orthomerge.cli.measuring import say

    return (lambda text: None) if quiet else lambda text: say(f"{title}: {text}")


def _check_out(recipe: Recipe, *, force: bool) -> None:
    """Before any work, as far as it can be told without opening the inputs."""
    from orthomerge.checkpoints.publish import check_target

    if recipe.out is not None:
        check_target(Path(recipe.out), force=force)


def _write(recipe: Recipe, *, force: bool, as_json: bool, quiet: bool) -> None:
    from orthomerge.cli.progress import shown
    from orthomerge.pipeline import merge

    with shown(quiet=quiet or as_json) as progress:
        result = merge(recipe, force=force, progress=progress)
    if not as_json:
        typer.echo(f"wrote {result.out}, verified; heads: {', '.join(result.manifest['heads'])}")


def _bench(origin: Path, sources: Mapping[str, str], *, readers: Mapping[str, str], device: str, batch: int) -> Bench:
    """The user's data, labels in the order of the head that reads them: `readers` gives its name, where it is fixed."""
    from orthomerge.data.labels import match_labels
    from orthomerge.data.processing import load_processor
    from orthomerge.data.reading import read_task
    from orthomerge.evaluation.bench import Bench
    from orthomerge.features.cache import FeatureCache
    from orthomerge.merged import load_head

    tasks = {task: replace(read_task(source), name=task) for task, source in sources.items()}
    for task, head in readers.items():
        tasks[task] = match_labels(tasks[task], load_head(origin / "heads" / head).labels)
    processor = load_processor(origin / "encoder", modality=next(iter(tasks.values())).modality)
    return Bench(tasks, processor, cache=FeatureCache(origin.parent / "features"), device=device, batch=batch)


def _document(found: Negation) -> dict[str, Any]:
    return {**asdict(found), "kept": found.kept}


def _print_negation(found: Negation, random: Negation, heads: str) -> None:
    from orthomerge.cli.commands import print_tables

    reader = "probes on the base's features" if heads == "probe" else "the experts' heads"
    tasks = (found.target, *found.controls)
    rows = [("base", "", *(_cell(found.base[task]) for task in tasks), "")]
    for title, result in ((f"minus {found.target}", found), ("random vector", random)):
        rows.append((title, f"{result.scale:g}", *(_cell(result.edited[task]) for task in tasks), f"{result.kept:.1%}"))
    columns = ("test accuracy", "scale", *tasks, "control kept")
    print_tables([Table.of("", columns, rows, left=len(columns))])
    typer.echo(
        f"read by {reader}; scales chosen on validation data, where {found.keep:.0%} of the control must be kept"
    )
    if found.scale == 0:
        typer.echo("scale 0 is the base: nothing of the grid forgets and keeps")


def _print_analogy(found: Analogy, form: Form) -> None:
    from orthomerge.cli.commands import print_tables

    best = found.best
    rows = {
        "base": found.base,
        f"fine-tuned on {form.c}": found.auxiliary,
        "analogy, unscaled": found.unscaled,
        f"analogy, {best.scale:g} and {best.shift:g}": found.edited,
        **({f"fine-tuned on {found.task}": found.expert} if found.expert is not None else {}),
    }
    columns = ("test accuracy", found.task)
    print_tables([Table.of("", columns, ((title, _cell(score)) for title, score in rows.items()), left=2)])
    typer.echo(
        f"{best.scale:g} {form.c} + {best.shift:g} ({form.b} - {form.a}), read by the head of {form.c}; "
        f"coefficients chosen on validation data of {found.task}"
    )
    if best.scale == best.shift == 0:
        typer.echo("that is the base: nothing of the grid is better")


def _cell(score: Score) -> str:
    return f"{100 * score.value:.1f} ({100 * score.low:.1f}-{100 * score.high:.1f})"
