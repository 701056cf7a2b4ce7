"""A merged model: one encoder, one classifier a task; loaded, run, verified, exported."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.checkpoints.checkpoint import Spec, is_float
from orthomerge.checkpoints.documents import read_json
from orthomerge.checkpoints.files import RawFile
from orthomerge.checkpoints.hashing import algorithm_of
from orthomerge.checkpoints.opening import open_checkpoint
from orthomerge.checkpoints.publish import MANIFEST, publish, write_json
from orthomerge.checkpoints.shards import write_shards
from orthomerge.classifiers import load_classifier, load_head
from orthomerge.errors import CheckpointError, RecipeError, nearest, some
from orthomerge.heads import Classifier, Head
from orthomerge.manifest import contained, is_plain_name, leaves, manifest_family, read_manifest
from orthomerge.models.config import classifier_config
from orthomerge.models.family import Family
from orthomerge.output import companions
from orthomerge.recipe import parse_size
from orthomerge.version import VERSION

if TYPE_CHECKING:
    import torch

__all__ = ["EXPORT", "Merged", "export", "load", "load_classifier", "load_head", "read_manifest", "verify"]

EXPORT = "orthomerge-export.json"  # only exports have it; transformers pays no heed to it
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
        return self.family.features(self.encoder, batch, self.pooling)

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
    family = manifest_family(manifest, folder)
    heads = {task: load_classifier(folder / "heads" / task) for task in manifest["heads"]}
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


def verify(path: str | Path) -> list[str]:
    """Re-derive every hash of an output folder; what is wrong, in words (empty: all is well)."""
    folder = Path(path)
    files = read_manifest(folder, any_name=True)["files"]
    found = {name: _file_problem(folder, name, expected) for name, expected in files.items()}
    problems = [f"{name if name.isprintable() else repr(name)} {what}" for name, what in found.items() if what]
    for file in sorted(file for file in folder.rglob("*") if file.is_symlink() or file.is_file()):
        name = file.relative_to(folder).as_posix()
        if name in files or name == MANIFEST:
            continue
        if file.is_symlink() and leaves(file, folder):
            problems.append(f"{name} is a link that leaves the folder, and was not written by the merge")
        elif not file.is_dir():
            problems.append(f"{name} was not written by the merge")
    return problems


def export(path: str | Path, task: str, to: str | Path, *, force: bool = False) -> None:
    """Write one task as an ordinary transformers classifier folder."""
    folder, target = Path(path), Path(to)
    manifest = read_manifest(folder)
    if task not in manifest["heads"]:
        raise RecipeError(f"{folder} has no task {task!r}; {nearest(task, manifest['heads'])}")
    family = manifest_family(manifest, folder)
    head = load_classifier(folder / "heads" / task)
    if not isinstance(head, Head):
        raise RecipeError(
            f"the classifier of {task!r} is a head behind a module of {head.kind!r}, for which transformers has no "
            "place; use orthomerge.load, or align the merge with an aligner that gives a head, such as auto"
        )
    layers = _check_exportable(family, manifest["pooling"], head)
    encoder = open_checkpoint(folder / "encoder")
    tensors = head.tensors()
    names = {
        f"{layer}.{piece}": tensors[part + piece]
        for layer, part in zip(layers, _PARTS[len(layers)], strict=True)
        for piece in ("weight", "bias")
        if part + piece in tensors
    }
    dtype = next((encoder.spec(key).dtype for key in encoder if is_float(encoder.spec(key).dtype)), None)
    if dtype is None:
        raise CheckpointError(f"{folder / 'encoder'} holds no weights in floating point; fetch it again")
    specs = {family.prefix + key: encoder.spec(key) for key in encoder}
    specs |= {name: Spec(tuple(tensor.shape), dtype) for name, tensor in names.items()}

    def blocks() -> Any:
        from orthomerge.checkpoints.checkpoint import torch_dtype

        for key in encoder:
            yield family.prefix + key, encoder[key]
        for name, tensor in names.items():
            yield name, tensor.to(torch_dtype(dtype))

    need = sum(spec.nbytes for spec in specs.values())
    beside = companions(folder / "encoder", within=folder)
    config = read_json(contained(folder / "encoder" / "config.json", folder))
    for name, expected in manifest["files"].items():  # an export has no manifest: what is damaged must not get there
        if name.startswith(("encoder/", f"heads/{task}/")) and (what := _file_problem(folder, name, expected)):
            raise CheckpointError(f"{folder / name} {what}; fetch the folder again, or merge again")
    origin = {"task": task, "manifest": RawFile(folder / MANIFEST).digest(), "orthomerge": VERSION}
    with publish(target, force=force, need=need, inputs=[folder], marker=EXPORT) as partial:
        write_shards(partial, specs, blocks(), most=parse_size("5GB"))
        for companion in beside:
            shutil.copyfile(companion, partial / companion.name)
        write_json(partial / EXPORT, origin)
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


def _file_problem(folder: Path, name: str, expected: Mapping[str, Any]) -> str | None:
    """What is wrong with one file of the manifest's table; nothing outside the folder is read."""
    if not is_plain_name(name):
        return "is outside the folder, and was not read; do not trust this manifest"
    file = folder / name
    if leaves(file, folder):
        return "is behind a link that leaves the folder, and was not read"
    try:
        size = file.stat().st_size if file.is_file() else None
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if size is None:
        return "is missing"
    if size != expected["size"]:
        return f"has {size} bytes, {expected['size']} were written"
    same = RawFile(file, algorithm=algorithm_of(expected["hash"])).digest() == expected["hash"]
    return None if same else "has changed since it was written"


def _fill(encoder: torch.nn.Module, folder: Path) -> None:
    """Copy the merged weights into a module; every one of its tensors must be there, and none besides."""
    merged = open_checkpoint(folder)
    wanted = encoder.state_dict()
    if set(wanted) != set(merged):
        raise CheckpointError(
            f"the module does not fit {folder}: only one of them has {some(sorted(set(wanted) ^ set(merged)))}"
        )
    misfits = [
        f"{key} {merged.spec(key).shape} instead of {tuple(tensor.shape)}"
        for key, tensor in wanted.items()
        if merged.spec(key).shape != tuple(tensor.shape)
    ]
    if misfits:
        raise CheckpointError(f"the module does not fit {folder}, which has {some(misfits)}; build it as it was merged")
    encoder.load_state_dict({key: merged[key] for key in merged})
    encoder.eval()
