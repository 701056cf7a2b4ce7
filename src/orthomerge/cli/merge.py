import time
from collections.abc import Mapping
from typing import Annotated, Any

from orthomerge.cli.flags import How, Input, Output, Parts, command
from orthomerge.cli.options import Base, Columns, Dtype, ExpertPaths, Force, Limit, Split, Unlabelled
from orthomerge.cli.printing import alignment_lines, fit_lines
from orthomerge.core.progress import Progress
from orthomerge.core.table import Table, plain


@command(
    "merge topic tone=tone.pth --base base --out merged",
    "merge topic tone --base base --data texts --out merged",
    "merge topic tone --base base --method ties --set density=0.3 -o out",
    "merge topic tone --base base --dry-run",
    usage=("merge EXPERT... --base BASE --out FOLDER [OPTIONS]", "merge RECIPE.yaml [OUT] [OPTIONS]"),
)
def merge(
    *,
    experts: ExpertPaths = (),
    base: Base = None,
    data: Unlabelled = None,
    split: Annotated[Split | None, Input("Split of the data to fit to.", default="train")] = None,
    limit: Limit = None,
    columns: Columns,
    method: Annotated[
        str | None, How("Merging method (`list methods`).", "NAME", default="realign with data, else task_arithmetic")
    ] = None,
    settings: Annotated[
        Mapping[str, str] | None,
        How("Option of the method (`list methods NAME`) or recipe key, repeated.", "KEY=VALUE", name="--set"),
    ] = None,
    device: Annotated[
        str | None,
        How("Device of a fit or a matrix decomposition.", "DEVICE", default="auto; cpu without fit"),
    ] = None,
    seed: Annotated[int | None, How("Random seed.", "N", default="0")] = None,
    out: Annotated[str | None, Output("Folder to write.", "FOLDER", short="-o")] = None,
    dtype: Dtype = None,
    max_shard_size: Annotated[str | None, Output("Maximum size of a file of weights.", "SIZE", default="5GB")] = None,
    force: Force = False,
    dry_run: Annotated[bool, Output("Check headers and list all problems; write nothing.")] = False,
    progress: Progress,
) -> Parts:
    """Merge experts into one model; with --data, fit it to inputs.

    Each task keeps its own labels and head on the one merged encoder.
    """
    from orthomerge.api.request import read_request
    from orthomerge.models.manifest import read_manifest
    from orthomerge.runs.models import plan, write

    recipe = read_request(
        experts,
        settings=settings,
        data=columns.of(data),
        split=split,
        limit=limit,
        device=device,
        base=base,
        method=method,
        seed=seed,
        out=out,
        dtype=dtype,
        max_shard_size=max_shard_size,
    )
    if dry_run:
        problems, document = plan(recipe)
        yield document
        yield from _plan(document)
        if problems:
            raise SystemExit(problems[0].error.exit_code)
        return
    if recipe.searches_scale:
        from orthomerge.api.merge import search_scale
        from orthomerge.models.experts import Experts

        how = {"seed": recipe.seed, "device": recipe.device, "vector": recipe.vector}
        search = search_scale(
            Experts(recipe.opening).check(), recipe.method, columns.of(data), recipe.parameters, **how
        )
        recipe = recipe.with_scale(search.best)
        curve = ", ".join(f"{scale:g}: {value:.1f}" for scale, value in search.means.items())
        progress.say(f"{search.criterion} on validation data, by scale: {curve}; the best is {search.best:g}")
    started = time.perf_counter()
    folder = write(recipe, force=force, progress=progress)
    manifest = read_manifest(folder)
    yield {"out": str(folder), "manifest": manifest}
    if "fit" in manifest:
        yield from fit_lines(manifest)
    if "alignment" in manifest:
        yield from alignment_lines(manifest)
    tasks = ", ".join(f"{task} ({len(head['labels'])})" for task, head in manifest["heads"].items())
    size = sum(file["size"] for file in manifest["files"].values() if not file.get("link"))
    yield f"wrote {folder}: {size / 1e6:,.1f} MB in {time.perf_counter() - started:.1f} s, verified; heads: {tasks}"


def _plan(document: Mapping[str, Any]) -> Parts:
    """Yield what a merge would do, and all its problems."""
    if "heads" in document:
        tensors, sizes = document["tensors"], {key: size / 1e6 for key, size in document["bytes"].items()}
        rows = [(task, str(len(labels)), ", ".join(labels)) for task, labels in document["heads"].items()]
        yield Table.of("", ("expert", "classes", "labels"), rows, left=3, wrap=("labels",))
        yield (
            f"{document['method']} of {len(rows)} {document['family']} experts: {tensors['merged']} tensors merged, "
            f"{tensors['copied']} copied, {len(document['left_out']['base'])} of the base left out\n"
            f"read {sizes['read']:,.0f} MB, write {sizes['write']:,.0f} MB"
        )
    for name in ("fit", "align"):
        if name in document:
            section = document[name]
            most = f", at most {section['limit']} per task" if section["limit"] else ""
            yield f"{name}: inputs of the {section['split']} split of {', '.join(section['tasks'])}{most}"
    for note in document["notes"]:
        yield f"note: {plain(note)}"
    if document["ok"]:
        yield "no problems"
        return
    rows = [(str(number), *problem.values()) for number, problem in enumerate(document["problems"], 1)]
    columns = ("where", "problem", "what to do")
    yield Table.of("", ("", *columns), rows, left=4, wrap=columns)
