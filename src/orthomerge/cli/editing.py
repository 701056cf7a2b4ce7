"""The commands `negate` and `analogy`: parse, call the library, print the accuracies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from orthomerge.cli.options import Base, Batch, Device, Dtype, Experts, Force, Grid, Json, Out, Quiet, RecipePath
from orthomerge.cli.printing import pair, print_json, print_tables
from orthomerge.core.errors import RecipeError
from orthomerge.core.table import Table

if TYPE_CHECKING:
    from orthomerge.evaluation.editing import Analogy, Negation
    from orthomerge.evaluation.metrics import Score
    from orthomerge.models.experts import Experts as Opened
    from orthomerge.models.model import Model
    from orthomerge.runs.recipe import Recipe


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
    from orthomerge.api.negate import negate as search
    from orthomerge.cli.commands import gather
    from orthomerge.cli.progress import shown
    from orthomerge.models.encoding import Encoding

    request = gather(recipe, base=base, experts=expert, out=out, dtype=dtype, aligning=False)
    sources, options = dict(pair(text, "--data TASK=PATH") for text in data), _grid(grid)
    experts = _opened(request, force=force)
    with shown(quiet=quiet or as_json) as progress:
        result = search(
            experts,
            target,
            sources,
            controls=control,
            heads=cast("Any", heads),
            keep=keep,
            dtype=request.dtype,
            seed=request.seed,
            encoding=Encoding(None, device, batch=batch),
            progress=progress,
            **options,
        )
    if as_json:
        searches = {"negated": _document(result.search), "random": _document(result.random)}
        print_json({"heads": heads, **searches, "out": request.out if result.model is not None else None})
    else:
        _print_negation(result.search, result.random, heads)
    if request.out is None:
        return
    if result.model is None:
        raise RecipeError(
            f"no scale of the grid forgets {target!r} and keeps {keep:.0%} of the control, so {request.out} was "
            "not written; give a finer --grid, or a smaller --keep"
        )
    _write(result.model, request, experts, sources.values(), force=force, as_json=as_json, quiet=quiet)


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
    from orthomerge.api.analogy import analogy as search
    from orthomerge.cli.commands import gather
    from orthomerge.cli.progress import shown
    from orthomerge.evaluation.editing import Form
    from orthomerge.models.encoding import Encoding

    request = gather(recipe, base=base, experts=expert, out=out, dtype=dtype, aligning=False)
    form, options = Form.parse(of), _grid(grid)
    task, source = pair(data, "--data TASK=PATH")
    experts = _opened(request, force=force)
    with shown(quiet=quiet or as_json) as progress:
        result = search(
            experts,
            of,
            task,
            source,
            independent=independent,
            dtype=request.dtype,
            seed=request.seed,
            encoding=Encoding(None, device, batch=batch),
            progress=progress,
            **options,
        )
    if as_json:
        print_json({**asdict(result.search), "out": None if result.model is None else request.out})
    else:
        _print_analogy(result.search, form.a, form.b, form.c)
    if request.out is None:
        return
    if result.model is None:
        raise RecipeError(
            f"nothing of the grid is better for {task!r} than the base itself, so {request.out} was not written; "
            "give another --grid, or another analogy"
        )
    _write(result.model, request, experts, [source], force=force, as_json=as_json, quiet=quiet)


def _grid(text: str | None) -> dict[str, Any]:
    """The option `grid`, written `0.1,0.5` and checked before any work; nothing if the default is meant."""
    from orthomerge.evaluation.span import scales
    from orthomerge.runs.recipe import parse_value

    if text is None:
        return {}
    grid = parse_value(f"[{text}]")
    scales(grid)
    return {"grid": grid}


def _opened(recipe: Recipe, *, force: bool) -> Opened:
    """The experts, after a look at the place to write to, which comes before any work."""
    from orthomerge.files.publish import check_target
    from orthomerge.models.experts import open_experts

    if recipe.out is not None:
        check_target(Path(recipe.out), force=force)
    return open_experts(recipe.opening).check()


def _write(
    model: Model, recipe: Recipe, experts: Opened, data: Iterable[str], *, force: bool, as_json: bool, quiet: bool
) -> None:
    from orthomerge.cli.progress import shown
    from orthomerge.models.writing import write_model

    if recipe.out is None:
        raise AssertionError("there is a place to write to")
    inputs = [source.path for source in experts.checkpoints().values() if not source.in_memory]
    inputs += [path for text in data if (path := Path(text).expanduser()).exists()]
    with shown(quiet=quiet or as_json) as progress:
        progress.stage("merging", sum(spec.nbytes for spec in model.weights.specs.values()))
        manifest = write_model(
            model,
            Path(recipe.out).expanduser(),
            force=force,
            max_shard_size=recipe.max_shard_size,
            inputs=inputs,
            progress=progress.advance,
        )
    if not as_json:
        typer.echo(f"wrote {recipe.out}, verified; heads: {', '.join(manifest['heads'])}")


def _document(search: Negation) -> dict[str, Any]:
    return {**asdict(search), "kept": search.kept}


def _print_negation(search: Negation, random: Negation, heads: str) -> None:
    reader = "probes on the base's features" if heads == "probe" else "the experts' heads"
    tasks = (search.target, *search.controls)
    rows = [("base", "", *(_cell(search.base[task]) for task in tasks), "")]
    for title, result in ((f"minus {search.target}", search), ("random vector", random)):
        rows.append((title, f"{result.scale:g}", *(_cell(result.edited[task]) for task in tasks), f"{result.kept:.1%}"))
    columns = ("test accuracy", "scale", *tasks, "control kept")
    print_tables([Table.of("", columns, rows, left=len(columns))])
    typer.echo(
        f"read by {reader}; scales chosen on validation data, where {search.keep:.0%} of the control must be kept"
    )
    if search.scale == 0:
        typer.echo("scale 0 is the base: nothing of the grid forgets and keeps")


def _print_analogy(search: Analogy, a: str, b: str, c: str) -> None:
    best = search.best
    rows = {
        "base": search.base,
        f"fine-tuned on {c}": search.auxiliary,
        "analogy, unscaled": search.unscaled,
        f"analogy, {best.scale:g} and {best.shift:g}": search.edited,
        **({f"fine-tuned on {search.task}": search.expert} if search.expert is not None else {}),
    }
    columns = ("test accuracy", search.task)
    print_tables([Table.of("", columns, ((title, _cell(score)) for title, score in rows.items()), left=2)])
    typer.echo(
        f"{best.scale:g} {c} + {best.shift:g} ({b} - {a}), read by the head of {c}; "
        f"coefficients chosen on validation data of {search.task}"
    )
    if best.scale == best.shift == 0:
        typer.echo("that is the base: nothing of the grid is better")


def _cell(score: Score) -> str:
    return f"{100 * score.value:.1f} ({100 * score.low:.1f}-{100 * score.high:.1f})"
