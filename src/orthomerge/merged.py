"""A merged model: one encoder, one classifier a task; loaded, run, verified, exported."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.checkpoints.checkpoint import Spec
from orthomerge.checkpoints.documents import read_json
from orthomerge.checkpoints.files import RawFile
from orthomerge.checkpoints.hashing import algorithm_of
from orthomerge.checkpoints.opening import open_checkpoint
from orthomerge.checkpoints.publish import MANIFEST, publish, write_json
from orthomerge.checkpoints.safetensors import read_safetensors
from orthomerge.checkpoints.shards import write_shards
from orthomerge.errors import CheckpointError, RecipeError, nearest, some
from orthomerge.heads import Classifier, Head, Linear
from orthomerge.models.config import classifier_config
from orthomerge.models.families import family as find_family
from orthomerge.models.family import Family
from orthomerge.output import FORMAT, companions
from orthomerge.recipe import parse_size

if TYPE_CHECKING:
    import torch

__all__ = ["Merged", "export", "load", "load_head", "read_manifest", "verify"]

_PARTS = {1: ("",), 2: ("hidden.", "")}


@dataclass(frozen=True)
class Merged:
    """An encoder and the classifiers that read its features."""

    encoder: torch.nn.Module
    heads: Mapping[str, Classifier]
    family: Family
    pooling: str

    def features(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What the heads read: [B, d]."""
        return self.family.poolings[self.pooling](self.encoder, batch)

    def logits(self, task: str, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """One task's logits, [B, C]."""
        return self.head(task)(self.features(batch))

    def head(self, task: str) -> Classifier:
        if task not in self.heads:
            raise RecipeError(f"there is no task {task!r}; {nearest(task, self.heads)}")
        return self.heads[task]


def load(path: str | Path, *, encoder: torch.nn.Module | None = None) -> Merged:
    """Load an output folder. A `generic` family cannot build its module: give one, its weights are then filled in."""
    folder = Path(path)
    manifest = read_manifest(folder)
    family = _family(manifest)
    heads = {task: load_head(folder / "heads" / task) for task in manifest["heads"]}
    if encoder is not None:
        _fill(encoder, folder / "encoder")
    elif family.encoder_class:
        from orthomerge.models.load import load_encoder

        encoder = load_encoder(folder / "encoder", family)
    else:
        raise RecipeError(
            f"{folder} holds weights of a module of your own; build it and give it: load(path, encoder=module)"
        )
    return Merged(encoder, heads, family, manifest["pooling"])


def load_head(folder: Path) -> Head:
    """One task's head from its folder."""
    document = read_json(folder / "labels.json")
    entries = read_safetensors(folder / "head.safetensors")
    parts = {name: entry.read(0, entry.spec.numel).reshape(entry.spec.shape) for name, entry in entries.items()}
    hidden = Linear(parts["hidden.weight"], parts.get("hidden.bias")) if "hidden.weight" in parts else None
    output = Linear(parts["weight"], parts.get("bias"))
    return Head(output, tuple(document["labels"]), hidden, document["activation"], document["normalise"])


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an output folder; without one it is not an output."""
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder} is not an orthomerge output: it has no {MANIFEST}; give the folder that `orthomerge merge` wrote"
        )
    manifest = read_json(folder / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder / MANIFEST} has format {manifest.get('format')!r}, this version reads {FORMAT}; update orthomerge"
        )
    return manifest


def verify(path: str | Path) -> list[str]:
    """Re-derive every hash of an output folder; what is wrong, in words (empty: all is well)."""
    folder = Path(path)
    files = read_manifest(folder)["files"]
    problems: list[str] = []
    for name, expected in files.items():
        file = folder / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size != expected["size"]:
            problems.append(f"{name} has {file.stat().st_size} bytes, {expected['size']} were written")
        elif RawFile(file, algorithm=algorithm_of(expected["hash"])).digest() != expected["hash"]:
            problems.append(f"{name} has changed since it was written")
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        name = file.relative_to(folder).as_posix()
        if name not in files and name != MANIFEST:
            problems.append(f"{name} was not written by the merge")
    return problems


def export(path: str | Path, task: str, to: str | Path, *, force: bool = False) -> None:
    """Write one task as an ordinary transformers classifier folder."""
    folder, target = Path(path), Path(to)
    manifest = read_manifest(folder)
    if task not in manifest["heads"]:
        raise RecipeError(f"{folder} has no task {task!r}; {nearest(task, manifest['heads'])}")
    family = _family(manifest)
    head = load_head(folder / "heads" / task)
    layers = _check_exportable(family, manifest["pooling"], head)
    encoder = open_checkpoint(folder / "encoder")
    tensors = head.tensors()
    names = {
        f"{layer}.{piece}": tensors[part + piece]
        for layer, part in zip(layers, _PARTS[len(layers)], strict=True)
        for piece in ("weight", "bias")
        if part + piece in tensors
    }
    dtype = next(encoder.spec(key).dtype for key in encoder if encoder.spec(key).dtype.startswith(("F", "BF")))
    specs = {family.prefix + key: encoder.spec(key) for key in encoder}
    specs |= {name: Spec(tuple(tensor.shape), dtype) for name, tensor in names.items()}

    def blocks() -> Any:
        from orthomerge.checkpoints.checkpoint import torch_dtype

        for key in encoder:
            yield family.prefix + key, encoder[key]
        for name, tensor in names.items():
            yield name, tensor.to(torch_dtype(dtype))

    need = sum(spec.nbytes for spec in specs.values())
    with publish(target, force=force, need=need, inputs=[folder], marker="config.json") as partial:
        write_shards(partial, specs, blocks(), most=parse_size("5GB"))
        for companion in companions(folder / "encoder"):
            shutil.copyfile(companion, partial / companion.name)
        config = read_json(folder / "encoder" / "config.json")
        write_json(partial / "config.json", classifier_config(config, family, head.labels))


def _check_exportable(family: Family, pooling: str, head: Head) -> tuple[str, ...]:
    """Names of the head's layers in the stock classifier, or why there is none that computes the same."""
    way_out = "use orthomerge.load, or encoder/ with the head beside it"
    if family.architecture is None or family.head is None:
        raise RecipeError(f"transformers has no classifier that computes what {family.name!r} does; {way_out}")
    if pooling != family.default_pooling:
        ours = f"{family.architecture} reads features by {family.default_pooling!r}, this model by {pooling!r}"
        raise RecipeError(f"{ours}; {way_out}")
    built = (2 if head.hidden is not None else 1, head.activation, head.normalise)
    if built != (len(family.head.layers), family.head.activation, family.head.normalise):
        raise RecipeError(f"the head is built otherwise than in {family.architecture}; {way_out}")
    return family.head.layers


def _family(manifest: dict[str, Any]) -> Family:
    if manifest["family"] == "generic":
        from orthomerge.models.generic import generic

        return generic(manifest["encoder"]["prefix"])
    return find_family(manifest["family"])


def _fill(encoder: torch.nn.Module, folder: Path) -> None:
    """Copy the merged weights into a module; every one of its tensors must be there, and none besides."""
    merged = open_checkpoint(folder)
    wanted = encoder.state_dict()
    if set(wanted) != set(merged):
        raise CheckpointError(
            f"the module does not fit {folder}: only one of them has {some(sorted(set(wanted) ^ set(merged)))}"
        )
    encoder.load_state_dict({key: merged[key] for key in merged})
    encoder.eval()
