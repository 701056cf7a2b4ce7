"""The only writer of model folders (layout: `manifest`), and the export of one task for its stock class.

The manifest is written last: a folder without it is not a model.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
from collections.abc import Iterable, Mapping
from contextlib import closing
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.core.checks import parse_size
from orthomerge.core.errors import RecipeError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.core.version import VERSION
from orthomerge.files.checkpoint import DTYPES, Spec, is_float, torch_dtype
from orthomerge.files.documents import write_bytes, write_json
from orthomerge.files.folders import EXPORT, LOCAL, MANIFEST, names_in, write_marker
from orthomerge.files.publish import publish
from orthomerge.files.raw_file import RawFile
from orthomerge.files.safetensors import plan_shards, write_index, write_shards
from orthomerge.models.card import model_card
from orthomerge.models.family import classifier_config, head_names, named_tensors, why_not_stock
from orthomerge.models.heads import Head, head_of
from orthomerge.models.manifest import (
    ENCODER,
    EXTRA,
    FORMAT,
    HEAD,
    HEAD_FIELDS,
    README,
    local_document,
    read_manifest,
    record_of,
)
from orthomerge.models.model_data import ModelData
from orthomerge.models.processors import COMPANIONS
from orthomerge.models.tensors import HashedTensors, MemoryTensors

if TYPE_CHECKING:
    import torch


_INDEX = "model.safetensors.index.json"


def write_model(
    model: ModelData,
    out: Path,
    *,
    force: bool = False,
    max_shard_size: str | int = "5GB",
    inputs: Iterable[Path] = (),
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Write a model folder atomically and return its manifest. `inputs`: paths that `out` must not overlap."""
    most = parse_size(max_shard_size)
    reserved = {name.casefold() for name in (*COMPANIONS, *model.processor.files, README, MANIFEST, LOCAL)}
    for task in model.heads:
        name = task.casefold()
        if name in reserved or (name.startswith(ENCODER) and name.endswith(".safetensors")):
            raise RecipeError(
                f"{task!r} cannot name a task, because the output has a file of that name; rename the task"
            )
    need = sum(spec.nbytes for spec in model.weights.specs.values())
    progress.stage("merging", need)
    with publish(out, force=force, need=need, inputs=[*inputs, *_inputs(model)]) as folder:
        return _fill(model, folder, out=out, most=most, progress=progress)


def _inputs(model: ModelData) -> list[Path]:
    experts = model.origin.experts
    opened = [] if experts is None else experts.checkpoints().values()
    places = [place for place in map(Path, model.origin.places.values()) if place.exists()]
    folder = [model.processor.folder] if model.processor.folder is not None else []
    return [*(source.path for source in opened if not source.in_memory), *places, *folder]


def _fill(model: ModelData, folder: Path, *, out: Path, most: int, progress: Progress) -> dict[str, Any]:
    family = model.family
    specs = {family.prefix + key: spec for key, spec in model.weights.specs.items()}
    processor = model.processor.write(folder)
    hashed = HashedTensors(model.weights, family.prefix)
    single = len(plan_shards(specs, most)) == 1  # then the hash of the file is that of the content
    blocks = model.weights.blocks() if single else hashed.blocks()
    with closing((family.prefix + key, block) for key, block in blocks) as named:
        written = write_shards(folder, specs, named, max_bytes=most, progress=progress.advance, stem=ENCODER)
    model.encoder.content = written[0].digest if single else hashed.digest()
    shards = {shard.name: {"size": shard.size, "hash": shard.digest} for shard in written}
    places = {name: shard.name for shard in written for name in shard.tensors}
    dtype = _main_dtype(specs.values())
    heads = {task: _write_task(model, task, folder, places, dtype, processor) for task in model.tasks}
    if model.origin.experts is not None:
        for checkpoint in model.origin.experts.checkpoints().values():
            for file in checkpoint.files:
                file.check_unchanged()
    content = {
        "format": FORMAT,
        "orthomerge": VERSION,
        "seed": 0,
        "vector": None,
        "notes": (),
        **model.origin.facts,
        "family": family.name,
        "encoder": {
            "class": family.encoder_class,
            "prefix": family.prefix,
            "dtype": dtype,
            "config": model.config,
            "content": model.encoder.content,
            "files": list(shards),
            "processor": processor,
        },
        "heads": heads,
        **record_of(model),
        "versions": versions(),
    }
    manifest: dict[str, Any] = plain(content)
    if local := local_document(model, out):
        write_json(folder / LOCAL, local)
    write_bytes(folder / README, model_card(manifest).encode())
    manifest["files"] = _file_table(folder, shards)
    write_json(folder / MANIFEST, manifest)
    return manifest


def _main_dtype(specs: Iterable[Spec]) -> str:
    dtypes = [spec.dtype for spec in specs if is_float(spec.dtype)]
    return max(sorted(set(dtypes)), key=dtypes.count) if dtypes else "F32"


def _write_task(
    model: ModelData, task: str, folder: Path, places: Mapping[str, str], dtype: str, processor: Iterable[str]
) -> dict[str, Any]:
    """Write the folder of one task and return its manifest entry. `places`: file of each encoder tensor."""
    task_folder, classifier, family = folder / task, model.heads[task], model.family
    head = head_of(classifier)
    task_folder.mkdir()
    tensors = named_tensors(family, head)
    _write_tensors(task_folder, HEAD, tensors)
    if not isinstance(classifier, Head):
        _write_tensors(task_folder, EXTRA, classifier.extra_tensors())
    stock = why_not_stock(family, classifier) is None and bool(model.config)
    if stock:
        for name in (*dict.fromkeys(places.values()), *processor):
            try:
                (task_folder / name).symlink_to(Path("..") / name)
            except OSError:
                _link(folder / name, task_folder / name)
        total = sum(spec.nbytes for spec in model.weights.specs.values())
        total += sum(tensor.nbytes for tensor in tensors.values())
        write_index(task_folder / _INDEX, {**places, **dict.fromkeys(tensors, HEAD)}, total)
        write_json(task_folder / "config.json", classifier_config(model.config, family, head.labels, DTYPES[dtype][1]))
    else:
        write_json(task_folder / "labels.json", list(head.labels))
    return {
        "labels": list(head.labels),
        **{name: getattr(head, name) for name in HEAD_FIELDS},
        "pooling": head.pooling or family.default_pooling,
        "names": head_names(family, head),
        "extra": None if isinstance(classifier, Head) else classifier.kind,
        "class": family.architecture if stock else None,
    }


def _write_tensors(folder: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    specs = MemoryTensors(tensors).specs
    blocks = ((key, tensor.detach().cpu()) for key, tensor in tensors.items())
    write_shards(folder, {key: specs[key] for key in tensors}, blocks, max_bytes=2**62, stem=Path(name).stem)


def _link(path: str | Path, target: str | Path) -> None:
    try:
        os.link(path, target)
    except OSError:
        shutil.copy2(path, target)


def link_folder(folder: Path, target: Path, *, without: set[str]) -> None:
    """Fill `target` with hard links to the files of a folder, or copies, except for files `without` at its root."""

    def left_out(inside: str, names: Iterable[str]) -> set[str]:
        return without if Path(inside) == folder else set()

    shutil.copytree(folder, target, symlinks=True, ignore=left_out, copy_function=_link, dirs_exist_ok=True)


def _file_table(folder: Path, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """List size and hash of every file; a link has those of its target. `rows`: entries of hashed files."""
    table: dict[str, Mapping[str, Any]] = {}
    for name in sorted(names_in(folder)):
        path = folder / name
        if path.is_symlink():
            target = (path.parent / path.readlink()).resolve().relative_to(folder.resolve()).as_posix()
            table[name] = {**(rows.get(target) or _row(path)), "link": target}
        elif name != LOCAL:
            table[name] = rows.get(name) or _row(path)
    return table


def _row(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "hash": RawFile(path).digest()}


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that can change results."""
    return {"python": platform.python_version(), "torch": version("torch"), "numpy": version("numpy")}


def plain(value: Any) -> Any:
    """Convert a value for JSON: tuples become lists, infinity and NaN become strings."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def rewrite_card(folder: Path, evaluation: Mapping[str, Any] | None) -> None:
    """Write card and manifest with or without an evaluation in one atomic step; all other files and links stay."""
    manifest = {name: value for name, value in read_manifest(folder).items() if name != "evaluation"}
    if evaluation is not None:
        manifest["evaluation"] = plain(evaluation)
    with publish(folder, force=True, unlisted=names_in(folder)) as partial:
        link_folder(folder, partial, without={README, MANIFEST})
        write_bytes(partial / README, model_card(manifest).encode())
        manifest["files"] = {**manifest["files"], README: _row(partial / README)}
        write_json(partial / MANIFEST, manifest)


def write_stock(model: ModelData, task: str, out: Path, *, force: bool = False, inputs: tuple[Path, ...] = ()) -> None:
    """Write one task as a folder for its stock class. `inputs`: paths that `out` must not overlap."""
    head, family = model.head(task), model.family
    reason = why_not_stock(family, head)
    if reason is not None or not isinstance(head, Head):
        raise RecipeError(
            f"no stock class can hold the head of {task!r}: {reason}; use orthomerge.load, which runs every head"
        )
    encoder = {family.prefix + key: spec for key, spec in model.weights.specs.items()}
    dtype = _main_dtype(encoder.values())
    tensors = {name: tensor.to(torch_dtype(dtype)) for name, tensor in named_tensors(family, head).items()}
    specs = {**encoder, **{name: Spec(tuple(tensor.shape), dtype) for name, tensor in tensors.items()}}
    blocks = chain(((family.prefix + key, block) for key, block in model.weights.blocks()), tensors.items())
    need = sum(spec.nbytes for spec in specs.values())
    with publish(out, force=force, need=need, inputs=inputs, marker=EXPORT) as folder:
        write_shards(folder, specs, blocks, max_bytes=parse_size("5GB"))
        model.processor.write(folder)
        write_json(folder / "config.json", classifier_config(model.config, family, head.labels, DTYPES[dtype][1]))
        write_marker(folder, EXPORT, orthomerge=VERSION, task=task, model=model.digest)
