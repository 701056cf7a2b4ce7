"""The command `merge`."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import click

from orthomerge.cli.flags import Flag, command
from orthomerge.cli.options import Base, Columns, Display, Dtype, Experts, Force, Limit, Split, Unlabelled
from orthomerge.cli.printing import print_json, print_progress, print_tables
from orthomerge.core.table import Table, plain

if TYPE_CHECKING:
    from orthomerge.runs.models import Plan
    from orthomerge.runs.recipe import Recipe

# Names of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


@dataclass(frozen=True)
class Input:
    """What is merged, and what a fitted method looks at."""

    experts: Experts = ()
    base: Base = None
    data: Unlabelled = field(default_factory=dict)
    split: Annotated[Split | None, Flag("Split of the data that a fitted method sees.", default="train")] = None
    limit: Limit = None


@dataclass(frozen=True)
class How:
    """The method and where it is computed."""

    method: Annotated[
        str | None, Flag("See `list methods`.", "NAME", default="realign with data, else task_arithmetic")
    ] = None
    settings: Annotated[
        dict[str, str],
        Flag("Option of the method (`list methods NAME`) or key of a recipe, repeated.", "KEY=VALUE", name="--set"),
    ] = field(default_factory=dict)
    device: Annotated[
        str | None,
        Flag("Of a fit, or of a method that decomposes matrices.", "DEVICE", default="auto; cpu without fit"),
    ] = None
    seed: Annotated[int | None, Flag("Of all that is drawn at random.", "N", default="0")] = None


@dataclass(frozen=True)
class Output:
    """What is written."""

    out: Annotated[str | None, Flag("Folder to write.", "FOLDER", short="-o")] = None
    dtype: Dtype = None
    max_shard_size: Annotated[str | None, Flag("Largest file of weights.", "SIZE", default="5GB")] = None
    force: Force = False
    dry_run: Annotated[bool, Flag("Check the headers, list all problems at once, write nothing.")] = False


@command(
    usage=("merge EXPERT... --base BASE --out FOLDER [OPTIONS]", "merge RECIPE.yaml [OUT] [OPTIONS]"),
    examples=(
        "merge topic tone=tone.pth --base base --out merged",
        "merge topic tone --base base --data texts --out merged",
        "merge topic tone --base base --method ties --set density=0.3 -o out",
        "merge topic tone --base base --dry-run",
    ),
)
def merge(given: Input, columns: Columns, how: How, output: Output, display: Display) -> None:
    """Merge experts into one model; with --data, fit it to inputs.

    Each task keeps its own labels and head on the one merged encoder.
    """
    from orthomerge.api.request import AUTO, read_request

    recipe = read_request(
        given.experts,
        settings=how.settings,
        data=columns.of(given.data),
        split=given.split,
        limit=given.limit,
        device=how.device,
        base=given.base,
        method=how.method,
        seed=how.seed,
        out=output.out,
        dtype=output.dtype,
        max_shard_size=output.max_shard_size,
    )
    if output.dry_run:
        _plan(recipe, as_json=display.json)
        return
    _keep_freed_memory()
    if recipe.parameters.get("scale") == AUTO:
        from orthomerge.api.merge import search_scale

        search = search_scale(recipe, columns.of(given.data))
        recipe = recipe.with_scale(search.best)
        if not display.silent:
            print_progress(f"{search.criterion} on validation data, by scale:\n{search.plot()}")
    _write(recipe, force=output.force, display=display)


def _write(recipe: Recipe, *, force: bool, display: Display) -> None:
    from orthomerge.cli.progress import shown
    from orthomerge.runs.models import write

    started = time.perf_counter()
    with shown(quiet=display.silent) as progress:
        written = write(recipe, force=force, progress=progress)
    manifest = written.manifest
    if display.json:
        print_json({"out": str(written.out), "manifest": manifest})
        return
    if "fit" in manifest:
        _print_fit(manifest)
    if "alignment" in manifest:
        from orthomerge.cli.align import print_alignment

        print_alignment(manifest)
    tasks = ", ".join(f"{task} ({len(head['labels'])})" for task, head in manifest["heads"].items())
    size = sum(file["size"] for name, file in manifest["files"].items() if not file.get("link"))
    seconds = time.perf_counter() - started
    click.echo(f"wrote {written.out}: {size / 1e6:,.1f} MB in {seconds:.1f} s, verified; heads: {tasks}")


def _print_fit(manifest: Mapping[str, Any]) -> None:
    """What was fitted on which inputs, and its results."""
    about = manifest["fit"]
    inputs = ", ".join(f"{task} {facts['inputs']}" for task, facts in about["tasks"].items())
    click.echo(f"{manifest['method']['name']} on unlabelled inputs of {about['split']} ({about['access']}): {inputs}")
    for name, value in about["facts"].items():
        if isinstance(value, Mapping) and any(isinstance(item, Mapping) for item in value.values()):
            continue  # a table: it is in the manifest
        numbers = value if isinstance(value, Mapping) else {"": value}
        texts = (f"{key} {_shown(number)}".strip() for key, number in numbers.items())
        click.echo(f"  {name.replace('_', ' ')}: {', '.join(texts)}")


def _shown(value: object) -> str:
    return format(value, ".4g") if isinstance(value, float) else str(value)


def _keep_freed_memory() -> None:
    """Tell glibc not to hand memory back after every block: the next one takes it again, page fault by page fault."""
    with suppress(OSError, AttributeError):
        tune = ctypes.CDLL("libc.so.6").mallopt
        tune(_M_MMAP_THRESHOLD, 32 << 20)
        tune(_M_TRIM_THRESHOLD, 256 << 20)


def _plan(recipe: Recipe, *, as_json: bool) -> None:
    """What a merge would do and everything that is wrong with it."""
    from orthomerge.runs.models import plan

    if recipe.parameters.get("scale") == "auto":  # any number plans alike
        recipe = recipe.with_scale(1.0)
    planned = plan(recipe)
    document = _document(planned)
    if as_json:
        print_json(document)
    else:
        _print_plan(document)
    if planned.problems:
        raise SystemExit(planned.problems[0].error.exit_code)


def _document(planned: Plan) -> dict[str, Any]:
    document: dict[str, Any] = {
        "ok": not planned.problems,
        "problems": [{"where": each.where, "what": each.what, "fix": each.fix} for each in planned.problems],
        "notes": list(planned.experts.notes),
    }
    if (parts := planned.experts.partial) is not None:
        left_out = {task: source.split.left_out for task, source in parts.sources.items()}
        document |= {
            "family": parts.family.name,
            "method": planned.recipe.method,
            "tensors": {"merged": len(parts.merged), "copied": len(parts.copied)},
            "left_out": {"base": parts.base_split.left_out, **left_out},
            "heads": {task: list(source.labels) for task, source in parts.sources.items()},
            "bytes": dict(planned.bytes),
        }
        for name in ("fit", "align"):
            if (section := getattr(planned.recipe, name)) is not None:
                document[name] = {"split": section.split, "limit": section.limit, "tasks": list(section.data)}
    return document


def _print_plan(document: Mapping[str, Any]) -> None:
    if "heads" in document:
        tensors, sizes = document["tensors"], {key: size / 1e6 for key, size in document["bytes"].items()}
        rows = [(task, str(len(labels)), ", ".join(labels)) for task, labels in document["heads"].items()]
        print_tables([Table.of("", ("expert", "classes", "labels"), rows, left=3, wrap=("labels",))])
        click.echo(
            f"{document['method']} of {len(rows)} {document['family']} experts: {tensors['merged']} tensors merged, "
            f"{tensors['copied']} copied, {len(document['left_out']['base'])} of the base left out\n"
            f"read {sizes['read']:,.0f} MB, write {sizes['write']:,.0f} MB, "
            f"at most {sizes['memory']:,.0f} MB of blocks in memory"
        )
    for name in ("fit", "align"):
        if name in document:
            section = document[name]
            most = f", at most {section['limit']} per task" if section["limit"] else ""
            click.echo(f"{name}: inputs of the {section['split']} split of {', '.join(section['tasks'])}{most}")
    for note in document["notes"]:
        click.echo(f"note: {plain(note)}")
    if document["ok"]:
        click.echo("no problems")
        return
    rows = [(str(number), *problem.values()) for number, problem in enumerate(document["problems"], 1)]
    columns = ("where", "problem", "what to do")
    print_tables([Table.of("", ("", *columns), rows, left=4, wrap=columns)])
