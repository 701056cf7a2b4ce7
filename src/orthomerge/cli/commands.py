"""What the commands do once their arguments are read."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, Any

import typer

from orthomerge.core.table import Table, plain
from orthomerge.errors import OutputError, RecipeError
from orthomerge.recipe import Recipe, load_recipe_mapping, parse_value
from orthomerge.strict import build, schema

if TYPE_CHECKING:
    from orthomerge.planning import Job, Plan

AUTO = "auto"  # a scale that is chosen on validation data
# Names of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

__all__ = ["fit_block", "gather", "inspect", "merge", "pair", "pairs", "plan", "print_json", "print_tables", "verify"]


def gather(
    recipe: str | None,
    *,
    base: str | None,
    experts: list[str] | None,
    method: str | None = None,
    settings: list[str] | None = None,
    out: str | None,
    dtype: str | None,
    max_shard_size: str | None = None,
    aligning: bool = True,
    fit: Mapping[str, Any] | None = None,
) -> Recipe:
    """One recipe from a file and the command line, which wins.

    `aligning`: whether it may have the blocks `align` and `fit`. `fit`: what the command line says of a fit's inputs.
    """
    document: dict[str, Any] = dict(load_recipe_mapping(Path(recipe))) if recipe is not None else {}
    if method is not None and method != document.get("method"):
        document["parameters"] = {}  # options of another method mean nothing to this one
    flat = {"base": base, "method": method, "out": out, "dtype": dtype, "max_shard_size": max_shard_size}
    document |= {key: value for key, value in flat.items() if value is not None}
    if experts:
        document["experts"] = pairs(experts, "--expert NAME=PATH", "experts")
    own = set(schema(Recipe)) - {"parameters", "experts"}
    for text in settings or []:
        key, value = pair(text, "--set KEY=VALUE")
        parsed = parse_value(value)
        if key in own:
            document[key] = parsed
        else:
            parameters = document.get("parameters") or {}
            if not isinstance(parameters, dict):
                raise RecipeError(f"{recipe}: 'parameters' must be a mapping of options")
            document["parameters"] = {**parameters, key: parsed}
    if "align" in document and not aligning:
        raise RecipeError("this command does not align heads; leave 'align' out of the recipe, and align its output")
    if "fit" in document and not aligning:
        raise RecipeError("this command fits nothing; leave 'fit' out of the recipe, and use a method without inputs")
    document |= _fit_given(document, fit or {})
    if "experts" not in document:
        raise RecipeError("nothing to merge: give a recipe, or --base and one --expert NAME=PATH for each expert")
    return build(Recipe, document, where=recipe or "the command line")


def fit_block(data: list[str] | None, **options: Any) -> dict[str, Any]:
    """What the command line says of the inputs of a fit."""
    given = {key: value for key, value in options.items() if value is not None}
    return ({"data": pairs(data, "--data TASK=PATH", "tasks")} if data else {}) | given


def _fit_given(document: Mapping[str, Any], fit: Mapping[str, Any]) -> dict[str, Any]:
    """The block `fit` with what the command line says of it; the device alone where the method looks at no inputs."""
    alone = set(fit) - {"data", "device"}
    if not fit or not _is_fitted(document):
        if alone:
            raise RecipeError(f"--{min(alone)} is for a method that is fitted to inputs (--data); leave it out")
        return {"device": fit["device"]} if "device" in fit else {}
    block = document.get("fit") or {}
    return {"fit": {**block, **fit} if isinstance(block, dict) else block}


def _is_fitted(document: Mapping[str, Any]) -> bool:
    """Whether inputs on the command line are for a fitted method: it is one, or none is named."""
    from orthomerge.merging.methods import find_method

    parameters = document.get("parameters") or {}
    if isinstance(parameters, Mapping) and parameters.get("scale") == AUTO:
        return False
    method = document.get("method", AUTO)
    return method == AUTO or find_method(str(method)).fitted


def merge(recipe: Recipe, *, data: list[str], force: bool, as_json: bool, quiet: bool) -> None:
    from orthomerge.cli.progress import shown
    from orthomerge.pipeline import merge as run

    _keep_freed_memory()
    started = time.perf_counter()
    if recipe.parameters.get("scale") == AUTO:
        from orthomerge.cli.measuring import choose_scale

        chosen = choose_scale(replace(recipe, align=None), data, quiet=quiet or as_json)
        recipe = replace(chosen, align=recipe.align)
    elif data and recipe.fit is None:
        raise RecipeError(
            f"{recipe.method!r} looks at no inputs: --data is for fitted methods and --set scale=auto; leave it out"
        )
    with shown(quiet=quiet or as_json) as progress:
        result = run(recipe, force=force, progress=progress)
    if as_json:
        print_json({"out": str(result.out), "manifest": result.manifest})
        return
    if "fit" in result.manifest:
        _print_fit(result.manifest)
    if "alignment" in result.manifest:
        from orthomerge.cli.aligning import print_alignment

        print_alignment(result.manifest)
    tasks = ", ".join(f"{task} ({len(head['labels'])})" for task, head in result.manifest["heads"].items())
    size = sum(file["size"] for file in result.manifest["files"].values())
    typer.echo(
        f"wrote {result.out}: {size / 1e6:,.1f} MB in {time.perf_counter() - started:.1f} s, verified; heads: {tasks}"
    )


def _print_fit(manifest: Mapping[str, Any]) -> None:
    """What was fitted on which inputs, what came of it, and that nothing was added."""
    about = manifest["fit"]
    inputs = ", ".join(f"{task} {found['inputs']}" for task, found in about["tasks"].items())
    typer.echo(f"{manifest['method']['name']} on unlabelled inputs of {about['split']} ({about['access']}): {inputs}")
    for name, value in about["facts"].items():
        if isinstance(value, Mapping) and any(isinstance(item, Mapping) for item in value.values()):
            continue  # a table: it is in the manifest
        typer.echo(f"  {name}: {value if not isinstance(value, float) else format(value, '.4g')}")


def _keep_freed_memory() -> None:
    """Tell glibc not to hand memory back after every block: the next one takes it again, page fault by page fault."""
    with suppress(OSError, AttributeError):
        tune = ctypes.CDLL("libc.so.6").mallopt
        tune(_M_MMAP_THRESHOLD, 32 << 20)
        tune(_M_TRIM_THRESHOLD, 256 << 20)


def plan(recipe: Recipe, *, as_json: bool) -> None:
    from orthomerge.checkpoints.publish import check_room, check_target
    from orthomerge.planning import make_plan

    if recipe.parameters.get("scale") == AUTO:  # chosen when the data has been looked at; any number plans alike
        recipe = replace(recipe, parameters={**recipe.parameters, "scale": 1.0})
    made = make_plan(recipe)
    if recipe.out is not None and made.job is not None:
        out, job = Path(recipe.out), made.job
        inputs = [source.path for source in job.sources.values()]
        made.attempt("out", lambda: check_target(out, inputs=inputs))
        made.attempt("out", lambda: check_room(out.absolute().parent, job.bytes_to_write))
    if as_json:
        print_json(_plan_document(made))
    else:
        _print_plan(made)
    if made.problems:
        raise SystemExit(made.problems[0].error.exit_code)


def _plan_document(made: Plan) -> dict[str, Any]:
    document: dict[str, Any] = {
        "ok": not made.problems,
        "problems": [{"where": p.where, "what": p.what, "fix": p.fix} for p in made.problems],
        "notes": made.notes,
    }
    if (job := made.job) is not None:
        document |= {
            "family": job.family.name,
            "method": made.recipe.method,
            "tensors": {"merged": len(job.merged), "copied": len(job.copied)},
            "left_out": {"base": job.base_split.left_out, **{t: e.split.left_out for t, e in job.experts.items()}},
            "heads": {task: list(expert.labels) for task, expert in job.experts.items()},
            "bytes": {"read": job.bytes_to_read, "write": job.bytes_to_write, "memory": job.peak_memory},
        }
        if (fit := made.recipe.fit) is not None:
            document["fit"] = {"split": fit.split, "limit": fit.limit, "tasks": list(fit.data)}
        if (block := made.recipe.align) is not None:
            document["align"] = {"aligner": block.aligner, "split": block.split, "tasks": list(block.data)}
    return document


def _print_plan(made: Plan) -> None:
    if (job := made.job) is not None:
        _print_job(job)
    for note in made.notes:
        typer.echo(f"note: {plain(note)}")
    if not made.problems:
        typer.echo("no problems")
        return
    columns = ("where", "problem", "what to do")
    rows = ((str(number), each.where, each.what, each.fix) for number, each in enumerate(made.problems, 1))
    print_tables([Table.of("", ("", *columns), rows, left=4, wrap=columns)])


def _print_job(job: Job) -> None:
    typer.echo(plain(f"{job.recipe.method} of {len(job.experts)} {job.family.title} experts on {job.base.path}"))
    rows = []
    for task, expert in job.experts.items():
        labels = ", ".join(expert.labels[:4]) + (" ..." if len(expert.labels) > 4 else "")
        counts = (len(expert.split.names), len(expert.split.left_out), len(expert.labels))
        rows.append((task, Path(expert.source.path).name, *counts, labels))
    columns = ("expert", "from", "tensors", "left out", "classes", "labels")
    print_tables([Table.of("", columns, rows, left=6, wrap=("from", "labels"))])
    typer.echo(
        f"encoder: {len(job.merged)} tensors merged, {len(job.copied)} copied; "
        f"{len(job.base_split.left_out)} of the base left out\n"
        f"read {job.bytes_to_read / 1e6:,.0f} MB, write {job.bytes_to_write / 1e6:,.0f} MB, "
        f"at most {job.peak_memory / 1e6:,.0f} MB of blocks in memory"
    )
    if (fit := job.recipe.fit) is not None:
        where = f"inputs of the {fit.split} split" + (f", at most {fit.limit} a task" if fit.limit else "")
        typer.echo(f"fitted to {where} of {', '.join(fit.data)}")
    if (block := job.recipe.align) is not None:
        where = f"inputs of the {block.split} split" + (f", at most {block.limit} a task" if block.limit else "")
        typer.echo(f"then the heads of {', '.join(block.data)} aligned by {block.aligner} on {where}")


def inspect(path: str, *, as_json: bool, headers: bool) -> None:
    from orthomerge.inspection import inspect_checkpoint

    found = inspect_checkpoint(path, headers=headers)
    if as_json:
        print_json(found)
        return
    for key, value in found.items():
        if key == "tensors":
            typer.echo(f"tensors: {len(value)}")
            for name, tensor in value.items():
                typer.echo(f"  {name}  {tensor['dtype']} {tuple(tensor['shape'])}")
        elif isinstance(value, Mapping):
            typer.echo(f"{key}:")
            for name, item in value.items():
                typer.echo(f"  {name}: {item}")
        else:
            typer.echo(f"{key}: {value}")


def verify(path: str, *, as_json: bool) -> None:
    from orthomerge.merged import verify as check

    problems = check(path)
    if as_json:
        print_json({"ok": not problems, "problems": problems})
    elif problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise OutputError(f"{path} is not what was written:\n{lines}\nmerge again, or fetch it again")
    else:
        typer.echo(f"{path}: every file is as it was written")
    if problems:
        raise SystemExit(OutputError.exit_code)


def pair(text: str, form: str) -> tuple[str, str]:
    """`NAME=VALUE` in two; `form` says in messages what was expected."""
    key, equals, value = text.partition("=")
    if not equals or not key or not value:
        raise RecipeError(f"expected {form}, got {text!r}")
    return key, value


def pairs(texts: list[str], form: str, what: str) -> dict[str, str]:
    """Several `NAME=VALUE`, each with a name of its own; `what` they are is for messages."""
    found = [pair(text, form) for text in texts]
    if len(dict(found)) < len(found):
        raise RecipeError(f"two {what} have the same name; give each {form.partition(' ')[0]} a name of its own")
    return dict(found)


def print_json(document: Any) -> None:
    """One document on standard output."""
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False, default=str))


def print_tables(tables: Iterable[Table]) -> None:
    """Tables for a terminal, with a blank line before each that has a title."""
    width = get_terminal_size().columns
    for table in tables:
        if table.title:
            typer.echo(f"\n{plain(table.title)}")
        header, *rows = table.text(width).split("\n")
        typer.echo("\n".join((typer.style(header, bold=True), *rows)))
        if table.note:
            typer.echo(fill(plain(table.note), width))
