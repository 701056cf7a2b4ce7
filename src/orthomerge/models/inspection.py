"""Description of a checkpoint as one document: family, tensors, dtypes, head, hashes, NaN count."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from orthomerge.core.errors import OrthomergeError
from orthomerge.files.checkpoint import Checkpoint, Spec, is_float
from orthomerge.files.opening import open_expert
from orthomerge.files.raw_file import RawFile
from orthomerge.models.families import family_for
from orthomerge.models.manifest import read_manifest
from orthomerge.models.saved import is_output, read_model, verify_folder
from orthomerge.models.split import OWN_HEAD, split_base
from orthomerge.models.tensors import FileTensors


def inspect_checkpoint(reference: str, *, headers: bool = False) -> dict[str, Any]:
    """Describe a checkpoint, an adapter or a merged model; with `headers` the weights are not read."""
    folder = Path(reference).expanduser()
    if is_output(folder):
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
        **_counts(specs.values()),
        **(_describe_model(stored) if is_checkpoint else {}),
        "files": files,
    }
    if not headers:
        for file in source.files:
            with RawFile(file.path).stream() as stream:
                files[file.path.name]["sha256"] = hashlib.file_digest(stream, "sha256").hexdigest()
        document["non_finite"] = _non_finite(FileTensors({name: (stored, name) for name in specs}))
    return {**document, "tensors": _listed(specs)}


def _describe_output(folder: Path, *, headers: bool) -> dict[str, Any]:
    manifest, model = read_manifest(folder), read_model(folder, verify=False)
    inputs, specs = manifest["inputs"], model.weights.specs
    document: dict[str, Any] = {
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
        **_counts(specs.values()),
        "notes": manifest["notes"],
        **({} if headers else {"problems": verify_folder(folder)}),
    }
    return {**document, "tensors": _listed(specs)}


def _counts(specs: Iterable[Spec]) -> dict[str, Any]:
    specs = list(specs)
    parameters = sum(spec.numel for spec in specs if is_float(spec.dtype))
    return {"parameters": parameters, "dtypes": dict(Counter(spec.dtype for spec in specs))}


def _listed(specs: Mapping[str, Spec]) -> dict[str, Any]:
    return {name: {"dtype": spec.dtype, "shape": list(spec.shape)} for name, spec in specs.items()}


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
    """Count the elements that are NaN or infinite, by tensor; tensors without any are left out."""
    counts: Counter[str] = Counter()
    for name, block in tensors.blocks():
        if block.is_floating_point():
            counts[name] += int((~block.float().isfinite()).sum())
    return dict(+counts)
