"""The models of a run: the merge, the same with its heads aligned, and what they are compared with.

RUN/models/METHOD            the merge
RUN/models/METHOD-ALIGNER    with its heads aligned
RUN/models/expert-TASK       an expert, weights unchanged
RUN/models/base              the base under the experts' heads

The last of the line, the merge or its aligned form, is at the recipe's `out` where it has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from orthomerge.aligning import align_merge
from orthomerge.experts import write_expert
from orthomerge.manifest import manifest_family, read_manifest
from orthomerge.pipeline import Progress, merge
from orthomerge.recipe import Recipe
from orthomerge.running.digests import Digests, digest_of, output_files
from orthomerge.version import VERSION

__all__ = [
    "MODELS",
    "Places",
    "align_key",
    "align_model",
    "base_of",
    "expert_of",
    "merge_key",
    "merge_model",
    "output_digest",
    "places_of",
    "references_key",
    "write_references",
]

MODELS = "models/"


@dataclass(frozen=True)
class Places:
    """Where the models of a run are. `aligned` and `base` are None where there are none; `experts`: by task."""

    merged: Path
    aligned: Path | None
    base: Path | None
    experts: Mapping[str, Path]

    @property
    def out(self) -> Path:
        """The last of the line."""
        return self.aligned or self.merged


def places_of(recipe: Recipe, run: Path) -> Places:
    """Where a recipe's models go; references only of what is scored."""
    folder, method = run / MODELS, recipe.method.replace("/", "_")
    last = Path(recipe.out).expanduser() if recipe.out is not None else None
    plain, aligned = folder / method, None
    if recipe.align is not None:
        aligned = last or folder / f"{method}-{recipe.align.aligner}".replace("/", "_")
    elif last is not None:
        plain = last
    block = recipe.evaluate
    if block is None:
        return Places(plain, aligned, None, {})
    base = folder / "base" if recipe.base is not None and block.references else None
    return Places(plain, aligned, base, {task: folder / f"expert-{task}" for task in block.data})


def merge_key(recipe: Recipe, digests: Digests) -> str:
    """What the merge depends on: the recipe without names of places, and the contents of its inputs."""
    bare = replace(recipe.merging, out=None, align=None, fit=None)
    fit = recipe.fit
    about: dict[str, Any] = {
        "version": VERSION,
        "recipe": {**asdict(bare), "base": None, "experts": {}},
        "base": None if recipe.base is None else digests.checkpoint(recipe.base),
        "experts": [
            (task, {**asdict(expert), "path": digests.checkpoint(expert.path)}) for task, expert in recipe.tasks.items()
        ],
    }
    if fit is not None:
        options = {name: value for name, value in vars(fit).items() if name not in ("data", "resume", "save_every")}
        about["fit"] = [options, {task: digests.source(source) for task, source in fit.data.items()}]
    return digest_of(about)


def merge_model(recipe: Recipe, places: Places, *, force: bool, progress: Progress) -> dict[Path, str]:
    """Merge or fit; the output's files with their hashes."""
    merge(replace(recipe, align=None), out=places.merged, force=force, progress=progress)
    return output_files(places.merged)


def align_key(recipe: Recipe, places: Places, digests: Digests) -> str:
    """What the aligned heads depend on: the merge, the experts, the block and its inputs."""
    block = recipe.align
    assert block is not None  # noqa: S101 - for mypy: the line has no such stage without
    options = {name: value for name, value in vars(block).items() if name != "data"}
    data = {task: digests.source(source) for task, source in block.data.items()}
    return digest_of([merge_key(recipe, digests), output_digest(places.merged), options, data])


def align_model(recipe: Recipe, places: Places, *, force: bool, progress: Progress) -> dict[Path, str]:
    """Align the heads; the output's files with their hashes."""
    assert places.aligned is not None  # noqa: S101 - as above
    align_merge(places.merged, recipe, to=places.aligned, force=force, progress=progress)
    return output_files(places.aligned)


def references_key(recipe: Recipe, places: Places, digests: Digests) -> str:
    """What base and experts depend on: the same inputs as the merge, read in the same way."""
    manifest = read_manifest(places.merged)
    read = [manifest["family"], manifest["pooling"], {task: head["labels"] for task, head in manifest["heads"].items()}]
    inputs = replace(recipe, method="average", parameters={}, vector=None, fit=None)
    return digest_of([merge_key(inputs, digests), read, sorted(places.experts), places.base is not None])


def write_references(recipe: Recipe, places: Places, *, progress: Progress) -> dict[Path, str]:
    """Write base and experts as outputs; all files with their hashes."""
    files = dict[Path, str]()
    for task, out in places.experts.items():
        progress.stage(f"expert {task}", None)
        expert_of(recipe, places.merged, task, out)
        files |= output_files(out)
    if places.base is not None:
        progress.stage("base", None)
        base_of(recipe, places.merged, places.base)
        files |= output_files(places.base)
    return files


def expert_of(recipe: Recipe, merged: Path, task: str, out: Path) -> None:
    """Write one expert, read as the merge is."""
    manifest = read_manifest(merged)
    family, labels = manifest_family(manifest, merged), tuple(manifest["heads"][task]["labels"])
    write_expert(recipe.merging, task, out, family=family, pooling=manifest["pooling"], labels=labels, force=True)


def base_of(recipe: Recipe, merged: Path, out: Path) -> None:
    """Write the base under the experts' heads, read as the merge is."""
    pooling = read_manifest(merged)["pooling"]
    alone = replace(
        recipe.merging, method="task_arithmetic", parameters={"scale": 0.0}, vector=None, align=None, fit=None
    )
    merge(replace(alone, pooling=pooling), out=out, force=True)


def output_digest(folder: Path) -> str:
    """What identifies an output, whatever its card says."""
    files = output_files(folder)
    return digest_of({path.relative_to(folder).as_posix(): digest for path, digest in files.items()})
