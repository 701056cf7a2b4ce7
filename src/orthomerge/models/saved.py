"""The only reader of model folders, which loads the same bytes that it verifies, and descriptions of checkpoints."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import CheckpointError, OrthomergeError, RecipeError, some
from orthomerge.files.checkpoint import Checkpoint, Entry, Spec, is_float
from orthomerge.files.folders import LOCAL, MANIFEST, contained, leaves, names_in
from orthomerge.files.opening import open_expert
from orthomerge.files.raw_file import RawFile
from orthomerge.files.safetensors import read_safetensors
from orthomerge.models.families import family_for
from orthomerge.models.family import Family
from orthomerge.models.heads import Extra, Head, misfit, rebuilt
from orthomerge.models.manifest import (
    EXTRA,
    FACTS,
    HEAD,
    HEAD_FIELDS,
    RECORD,
    manifest_family,
    read_local,
    read_manifest,
)
from orthomerge.models.model import Model
from orthomerge.models.model_data import Encoder, Origin
from orthomerge.models.processors import ProcessorSource
from orthomerge.models.split import OWN_HEAD, split_base
from orthomerge.models.tensors import FileTensors, HashedTensors

if TYPE_CHECKING:
    import torch


_ADVICE = "fetch the folder again, or merge again"


def resolve(model: Model | str | Path) -> tuple[Model, Path | None]:
    """Return a model and its folder; the folder of a model in memory is None."""
    if isinstance(model, Model):
        return model, None
    if not isinstance(model, str | Path):
        raise RecipeError(f"a model must be a Model or the path of a saved one, got {type(model).__name__}")
    folder = Path(model).expanduser()
    return read_model(folder), folder


def read_model(folder: Path, *, verify: bool = True) -> Model:
    """Read a saved model. Small files are verified at once, the encoder when all its tensors are read."""
    manifest = read_manifest(folder)
    family = manifest_family(manifest, folder)
    entry, files = manifest["encoder"], manifest["files"]
    for name, expected in files.items() if verify else ():
        is_small = PurePosixPath(name).name not in entry["files"]
        if problem := file_problem(folder, name, expected, hashed=is_small):
            raise CheckpointError(f"{folder / name} {problem}; {_ADVICE}")
    hashes = {name: files[name]["hash"] for name in files if verify}
    heads = {task: _head(folder, task, head, hashes) for task, head in manifest["heads"].items()}
    processor = ProcessorSource(family.modality, entry["config"], folder, tuple(entry["processor"]), hashes=hashes)
    local = read_local(folder)
    origin = Origin(
        {name: manifest[name] for name in FACTS if name in manifest},
        record={name: manifest[name] for name in RECORD},
        places=local["places"],
        inputs=local["inputs"],
    )
    tensors = _encoder(folder, entry, family, verify=verify)
    return Model(Encoder(family, entry["config"], tensors), heads, processor, origin)


@dataclass(frozen=True, eq=False)
class _VerifiedTensors(FileTensors):
    """Tensors of a saved encoder; each complete pass verifies their hash."""

    folder: Path = field(default_factory=Path)
    content: str = ""
    prefix: str = ""

    def blocks(self) -> Iterator[tuple[str, torch.Tensor]]:
        hashed = HashedTensors(FileTensors(self.places), self.prefix)
        yield from hashed.blocks()
        if hashed.digest() != self.content:
            raise CheckpointError(f"the encoder in {self.folder} has changed since it was written; {_ADVICE}")


def _encoder(folder: Path, entry: Mapping[str, Any], family: Family, *, verify: bool) -> FileTensors:
    entries: dict[str, Entry] = {}
    for name in entry["files"]:
        entries |= read_safetensors(contained(folder / name, folder))
    if not entries or not all(name.startswith(family.prefix) for name in entries):
        raise CheckpointError(f"the encoder in {folder} must have names that start with {family.prefix!r}; {_ADVICE}")
    checkpoint = Checkpoint(folder, entries)
    places = {name.removeprefix(family.prefix): (checkpoint, name) for name in entries}
    return _VerifiedTensors(places, folder, entry["content"], family.prefix) if verify else FileTensors(places)


def _head(folder: Path, task: str, entry: Mapping[str, Any], hashes: Mapping[str, str]) -> Head | Extra:
    """Read the classifier of one task. `hashes`: expected hashes by file, empty to verify none."""
    path = folder / task / HEAD
    stored = _read_tensors(path, folder, hashes.get(f"{task}/{HEAD}"))
    names = entry["names"]
    if sorted(names.values()) != sorted(stored):
        raise CheckpointError(
            f"{path} must hold the tensors {some(sorted(names.values()))}, got {some(sorted(stored))}; {_ADVICE}"
        )
    parts = {part: stored[name] for part, name in names.items()}
    _check_layers(parts, path, rows=len(entry["labels"]), activation=entry["activation"])
    head = Head.of(parts, tuple(entry["labels"]), **{name: entry[name] for name in HEAD_FIELDS})
    if entry.get("extra") is None:
        return head
    extra = folder / task / EXTRA
    return rebuilt(entry["extra"], head, _read_tensors(extra, folder, hashes.get(f"{task}/{EXTRA}")), where=extra)


def _read_tensors(path: Path, folder: Path, expected: str | None) -> dict[str, torch.Tensor]:
    entries = read_safetensors(contained(path, folder))
    tensors = {name: entry.read(0, entry.spec.numel).reshape(entry.spec.shape) for name, entry in entries.items()}
    if expected is not None and any(entry.file.digest() != expected for entry in entries.values()):
        raise CheckpointError(f"{path} has changed since it was written; {_ADVICE}")
    return tensors


def _check_layers(parts: Mapping[str, torch.Tensor], path: Path, *, rows: int, activation: str | None) -> None:
    weights = {"weight"} if activation is None else {"hidden.weight", "weight"}
    allowed = weights | {name.replace("weight", "bias") for name in weights}
    shapes = {name: tuple(tensor.shape) for name, tensor in parts.items()}
    is_valid = weights <= parts.keys() <= allowed and misfit(shapes) is None and shapes["weight"][0] == rows
    if not is_valid or not all(tensor.is_floating_point() for tensor in parts.values()):
        got = ", ".join(f"{name} {shapes[name]} {str(parts[name].dtype).removeprefix('torch.')}" for name in parts)
        raise CheckpointError(
            f"{path} must hold {len(weights)} linear layer{'s' * (len(weights) > 1)} with {rows} rows at the end, as "
            f"the manifest says (activation {activation or 'null'}), got {got}; {_ADVICE}"
        )


def verify_folder(folder: Path) -> list[str]:
    """Compare all files of a model folder with their hashes and return the problems as text."""
    files = read_manifest(folder)["files"]
    checked = {name: file_problem(folder, name, expected) for name, expected in files.items()}
    problems = [f"{name} {problem}" for name, problem in checked.items() if problem]
    others = sorted(name for name in names_in(folder) if name not in files and name not in (MANIFEST, LOCAL))
    return problems + [f"{name} was not written by the merge" for name in others if not name.endswith("/")]


def file_problem(folder: Path, name: str, expected: Mapping[str, Any], *, hashed: bool = True) -> str | None:
    """Describe the problem with a listed file, or return None. `hashed`: compare its hash besides its size."""
    file = folder / name
    if leaves(file, folder):
        return "is behind a link that leaves the folder, so it was not read"
    try:
        size = file.stat().st_size if file.is_file() else None
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if size is None:
        return "is missing"
    if size != expected["size"]:
        return f"has {size} bytes, but {expected['size']} were written"
    is_same = not hashed or RawFile(file).digest() == expected["hash"]
    return None if is_same else "has changed since it was written"


def inspect_checkpoint(reference: str, *, headers: bool = False) -> dict[str, Any]:
    """Describe a checkpoint, an adapter or a merged model; with `headers` the weights are not read."""
    folder = Path(reference).expanduser()
    if (folder / MANIFEST).is_file():
        return _describe_output(folder, headers=headers)
    source = open_expert(reference)
    is_checkpoint = isinstance(source, Checkpoint)
    stored = source if isinstance(source, Checkpoint) else Checkpoint(source.path, source.stored)
    specs = {name: entry.spec for name, entry in stored.entries.items()}
    files: dict[str, dict[str, Any]] = {file.path.name: {"size": file.size} for file in source.files}
    document: dict[str, Any] = {
        "path": str(source.path),
        "format": "checkpoint" if is_checkpoint else "LoRA adapter",
        "model_type": (source.config or {}).get("model_type" if is_checkpoint else "peft_type"),
        **(_describe_model(stored) if is_checkpoint else {}),
        "files": files,
    }
    if not headers:
        for file in source.files:
            with RawFile(file.path).stream() as stream:
                files[file.path.name]["sha256"] = hashlib.file_digest(stream, "sha256").hexdigest()
        document["non_finite"] = _non_finite(FileTensors({name: (stored, name) for name in specs}))
    return {**document, **_sizes(specs)}


def _describe_output(folder: Path, *, headers: bool) -> dict[str, Any]:
    manifest, model = read_manifest(folder), read_model(folder, verify=False)
    inputs, specs = manifest["inputs"], model.weights.specs
    return {
        "path": str(folder),
        "format": "merged model",
        "written_by": manifest["orthomerge"],
        "family": model.family.name,
        "method": manifest["method"],
        "tasks": {
            task: {"labels": head["labels"], "pooling": head["pooling"], "stock_class": head["class"]}
            for task, head in manifest["heads"].items()
        },
        "made_from": {
            "base": inputs["base"]["name"],
            **{task: entry["name"] for task, entry in inputs["experts"].items()},
        },
        "access": model.origin.access,
        "notes": manifest["notes"],
        **({} if headers else {"problems": verify_folder(folder)}),
        **_sizes(specs),
    }


def _sizes(specs: Mapping[str, Spec]) -> dict[str, Any]:
    return {
        "parameters": sum(spec.numel for spec in specs.values() if is_float(spec.dtype)),
        "dtypes": dict(Counter(spec.dtype for spec in specs.values())),
        "tensors": {name: {"dtype": spec.dtype, "shape": list(spec.shape)} for name, spec in specs.items()},
    }


def _describe_model(source: Checkpoint) -> dict[str, Any]:
    config = source.config or {}
    try:
        family = family_for(str(config.get("model_type")), source)
    except OrthomergeError:
        return {"family": None, "aliases": dict(source.aliases)}
    adapted = family.adapted(source)
    split = split_base({key: entry.spec for key, entry in adapted.entries.items()}, family)
    head = {name: list(adapted.spec(name).shape) for name, reason in split.left_out.items() if reason == OWN_HEAD}
    labels = config.get("id2label")
    return {
        "family": family.name,
        "encoder_tensors": len(split.names),
        "head": head,
        "labels": list(labels.values()) if head and isinstance(labels, dict) else [],
        "left_out": sorted(set(split.left_out) - set(head)),
        "unknown": list(split.unknown),
        "aliases": dict(source.aliases),
    }


def _non_finite(tensors: FileTensors) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for name, block in tensors.blocks():
        if block.is_floating_point():
            counts[name] += int((~block.float().isfinite()).sum())
    return dict(+counts)
