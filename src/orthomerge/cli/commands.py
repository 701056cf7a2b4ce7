"""What the commands do once their arguments are read."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from orthomerge.cli.printing import pair, pairs, print_json, print_tables
from orthomerge.core.errors import OutputError, RecipeError
from orthomerge.core.schema import build, schema
from orthomerge.core.table import Table, plain
from orthomerge.runs.recipe import Recipe, load_recipe_mapping, parse_value

if TYPE_CHECKING:
    from orthomerge.models.sources import Parts
    from orthomerge.runs.plan import Plan

AUTO = "auto"  # a scale that is chosen on validation data
# Names of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


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
    from orthomerge.runs.models import write

    _keep_freed_memory()
    started = time.perf_counter()
    if recipe.parameters.get("scale") == AUTO:
        from orthomerge.cli.scale import choose_scale

        sources = dict(pair(text, "--data TASK=PATH") for text in data)
        recipe = choose_scale(recipe, sources, quiet=quiet or as_json)
    elif data and recipe.fit is None:
        raise RecipeError(
            f"{recipe.method!r} looks at no inputs: --data is for fitted methods and --set scale=auto; leave it out"
        )
    with shown(quiet=quiet or as_json) as progress:
        written = write(recipe, force=force, progress=progress)
    manifest = written.manifest
    if as_json:
        print_json({"out": str(written.out), "manifest": manifest})
        return
    if "fit" in manifest:
        _print_fit(manifest)
    if "alignment" in manifest:
        from orthomerge.cli.aligning import print_alignment

        print_alignment(manifest)
    tasks = ", ".join(f"{task} ({len(head['labels'])})" for task, head in manifest["heads"].items())
    size = sum(file["size"] for name, file in manifest["files"].items() if not file.get("link"))
    typer.echo(
        f"wrote {written.out}: {size / 1e6:,.1f} MB in {time.perf_counter() - started:.1f} s, verified; heads: {tasks}"
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
    from orthomerge.runs.plan import plan as look

    if recipe.parameters.get("scale") == AUTO:  # chosen when the data has been looked at; any number plans alike
        recipe = recipe.with_scale(1.0)
    made = look(recipe)
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
        "notes": list(made.experts.notes),
    }
    if (parts := made.parts) is not None:
        left_out = {task: source.split.left_out for task, source in parts.sources.items()}
        document |= {
            "family": parts.family.name,
            "method": made.recipe.method,
            "tensors": {"merged": len(parts.merged), "copied": len(parts.copied)},
            "left_out": {"base": parts.base_split.left_out, **left_out},
            "heads": {task: list(source.labels) for task, source in parts.sources.items()},
            "bytes": {"read": made.bytes_to_read, "write": made.bytes_to_write, "memory": made.peak_memory},
        }
        if (fit := made.recipe.fit) is not None:
            document["fit"] = {"split": fit.split, "limit": fit.limit, "tasks": list(fit.data)}
        if (section := made.recipe.align) is not None:
            document["align"] = {"aligner": section.aligner, "split": section.split, "tasks": list(section.data)}
    return document


def _print_plan(made: Plan) -> None:
    if (parts := made.parts) is not None:
        _print_parts(made, parts)
    for note in made.experts.notes:
        typer.echo(f"note: {plain(note)}")
    if not made.problems:
        typer.echo("no problems")
        return
    columns = ("where", "problem", "what to do")
    rows = ((str(number), each.where, each.what, each.fix) for number, each in enumerate(made.problems, 1))
    print_tables([Table.of("", ("", *columns), rows, left=4, wrap=columns)])


def _print_parts(made: Plan, parts: Parts) -> None:
    recipe = made.recipe
    count = len(parts.sources)
    typer.echo(plain(f"{recipe.method} of {count} {parts.family.title} experts on {parts.base.path}"))
    rows = []
    for task, source in parts.sources.items():
        labels = ", ".join(source.labels[:4]) + (" ..." if len(source.labels) > 4 else "")
        counts = (len(source.split.names), len(source.split.left_out), len(source.labels))
        rows.append((task, Path(source.checkpoint.path).name, *counts, labels))
    columns = ("expert", "from", "tensors", "left out", "classes", "labels")
    print_tables([Table.of("", columns, rows, left=6, wrap=("from", "labels"))])
    typer.echo(
        f"encoder: {len(parts.merged)} tensors merged, {len(parts.copied)} copied; "
        f"{len(parts.base_split.left_out)} of the base left out\n"
        f"read {made.bytes_to_read / 1e6:,.0f} MB, write {made.bytes_to_write / 1e6:,.0f} MB, "
        f"at most {made.peak_memory / 1e6:,.0f} MB of blocks in memory"
    )
    if (fit := recipe.fit) is not None:
        where = f"inputs of the {fit.split} split" + (f", at most {fit.limit} per task" if fit.limit else "")
        typer.echo(f"fitted to {where} of {', '.join(fit.data)}")
    if (section := recipe.align) is not None:
        where = f"inputs of the {section.split} split" + (
            f", at most {section.limit} per task" if section.limit else ""
        )
        typer.echo(f"then the heads of {', '.join(section.data)} aligned by {section.aligner} on {where}")


def inspect(path: str, *, as_json: bool, headers: bool) -> None:
    from orthomerge.models.inspection import inspect_checkpoint

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
    from orthomerge.models.saved import verify_folder

    problems = verify_folder(Path(path))
    if as_json:
        print_json({"ok": not problems, "problems": problems})
    elif problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise OutputError(f"{path} is not what was written:\n{lines}\nmerge again, or fetch it again")
    else:
        typer.echo(f"{path}: every file is as it was written")
    if problems:
        raise SystemExit(OutputError.exit_code)
