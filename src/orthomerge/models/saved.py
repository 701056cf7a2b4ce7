"""The one reader of model folders: what was verified is what is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import CheckpointError, some
from orthomerge.files.checkpoint import Checkpoint, Entry
from orthomerge.files.hashing import algorithm_of
from orthomerge.files.links import contained, is_plain_name, leaves
from orthomerge.files.ownership import LOCAL, MANIFEST
from orthomerge.files.paths import RawFile
from orthomerge.files.safetensors import read_safetensors
from orthomerge.models.heads import Head
from orthomerge.models.manifest import EXTRA, HEAD, manifest_family, read_manifest
from orthomerge.models.model import Model
from orthomerge.models.model_data import Origin
from orthomerge.models.modules import Encoder
from orthomerge.models.processors import ProcessorSource
from orthomerge.models.record import read_local
from orthomerge.models.tensors import ContentHash, FileTensors

if TYPE_CHECKING:
    import torch

    from orthomerge.models.family import Family
    from orthomerge.models.heads import Extra


_FACTS = ("method", "seed", "vector", "notes", "fit", "alignment", "evaluation")
_RECORD = ("inputs", "opening", "tensors")
_WAY_OUT = "fetch the folder again, or merge again"


def is_output(path: Path) -> bool:
    """Whether a path is a folder with a manifest of ours."""
    return (path / MANIFEST).is_file()


def read_model(folder: Path, *, verify: bool = True) -> Model:
    """A saved model. Small files are verified now, the encoder whenever its tensors are read to the end."""
    manifest = read_manifest(folder)
    family = manifest_family(manifest, folder)
    about, files = manifest["encoder"], manifest["files"]
    large = {
        f"{folder}{name}" for folder in ("", *(f"{task}/" for task in manifest["heads"])) for name in about["files"]
    }
    for name in (name for name in files if verify and name not in large):
        if what := file_problem(folder, name, files[name]):
            raise CheckpointError(f"{folder / name} {what}; {_WAY_OUT}")
    tensors = _encoder(folder, manifest, family, verify=verify)
    heads = {task: _head(folder, task, head, files if verify else {}) for task, head in manifest["heads"].items()}
    hashes = {name: files[name]["hash"] for name in about["processor"] if verify}
    processor = ProcessorSource(family.modality, about["config"], folder, tuple(about["processor"]), hashes=hashes)
    local = read_local(folder, LOCAL)
    origin = Origin(
        {name: manifest[name] for name in _FACTS if name in manifest},
        record={name: manifest[name] for name in _RECORD},
        places=local["places"],
        inputs=local["inputs"],
    )
    return Model(Encoder(family, about["config"], tensors), heads, processor, origin)


@dataclass(frozen=True, eq=False)
class _VerifiedTensors(FileTensors):
    """Tensors of an output: each pass over all of them ends with an error if they are not what was written."""

    folder: Path = field(default_factory=Path)
    content: str = ""
    prefix: str = ""

    def blocks(self) -> Iterator[tuple[str, torch.Tensor]]:
        running = ContentHash(self.specs, self.prefix, algorithm=algorithm_of(self.content))
        for key, block in super().blocks():
            running.update(block)
            yield key, block
        if running.digest() != self.content:
            raise CheckpointError(f"the encoder in {self.folder} has changed since it was written; {_WAY_OUT}")


def _encoder(folder: Path, manifest: Mapping[str, Any], family: Family, *, verify: bool) -> FileTensors:
    """The encoder's files as one checkpoint, under canonical names."""
    entries: dict[str, Entry] = {}
    files = manifest["files"]
    for name in manifest["encoder"]["files"]:
        path = contained(folder / name, folder)
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; {_WAY_OUT}")
        held = read_safetensors(path)
        size = next(iter(held.values())).file.size if held else path.stat().st_size
        if size != files[name]["size"]:
            raise CheckpointError(f"{path} has {size} bytes, {files[name]['size']} were written; {_WAY_OUT}")
        if twice := sorted(set(held) & set(entries)):
            raise CheckpointError(f"{path} holds {some(twice)}, which another shard holds too; {_WAY_OUT}")
        entries |= held
    odd = [name for name in entries if not name.startswith(family.prefix)]
    if odd or not entries:
        raise CheckpointError(f"the encoder in {folder} must have names that start with {family.prefix!r}; {_WAY_OUT}")
    checkpoint = Checkpoint(folder, entries)
    places = {name.removeprefix(family.prefix): (checkpoint, name) for name in entries}
    if not verify:
        return FileTensors(places)
    return _VerifiedTensors(places, folder, manifest["encoder"]["content"], family.prefix)


def _head(folder: Path, task: str, about: Mapping[str, Any], files: Mapping[str, Any]) -> Head | Extra:
    """One task's classifier. `files`: size and hash of those that are compared with what was read."""
    path = contained(folder / task / HEAD, folder)
    stored = _read_tensors(path, files.get(f"{task}/{HEAD}"))
    names = about["names"]
    if sorted(names.values()) != sorted(stored):
        raise CheckpointError(
            f"{path} holds {some(sorted(stored))}, not the tensors that the manifest names; {_WAY_OUT}"
        )
    parts = {part: stored[name] for part, name in names.items()}
    check_parts(parts, path, rows=len(about["labels"]), activation=about["activation"])
    fields = {name: about[name] for name in ("activation", "normalise", "kind", "pooling", "max_length")}
    head = Head.of(parts, tuple(about["labels"]), **fields)
    if about.get("extra") is None:
        return head
    from orthomerge.models.extras import rebuilt

    extra = contained(folder / task / EXTRA, folder)
    return rebuilt(about["extra"], head, _read_tensors(extra, files.get(f"{task}/{EXTRA}")), where=extra)


def _read_tensors(path: Path, expected: Mapping[str, Any] | None) -> dict[str, torch.Tensor]:
    entries = read_safetensors(path, algorithm=algorithm_of(expected["hash"]) if expected else None)
    tensors = {name: entry.read(0, entry.spec.numel).reshape(entry.spec.shape) for name, entry in entries.items()}
    if expected is not None and any(entry.file.digest() != expected["hash"] for entry in entries.values()):
        raise CheckpointError(f"{path} has changed since it was written; {_WAY_OUT}")
    return tensors


def check_parts(parts: Mapping[str, torch.Tensor], path: Path, *, rows: int, activation: str | None) -> None:
    """A head's tensors must be those of one or two linear layers that fit each other and the labels."""
    if "weight" not in parts:
        raise CheckpointError(f"{path} has no 'weight', without which it is no head; {_WAY_OUT}")
    odd = sorted(set(parts) - {"weight", "bias", "hidden.weight", "hidden.bias"})
    if odd or ("hidden.bias" in parts and "hidden.weight" not in parts):
        raise CheckpointError(f"{path} holds {some(odd or ['hidden.bias'])}, which is no part of this head; {_WAY_OUT}")
    if ("hidden.weight" in parts) != (activation is not None):
        raise CheckpointError(
            f"{path} has {'a' if 'hidden.weight' in parts else 'no'} hidden layer, but the activation in the manifest "
            f"is {activation or 'null'}; they go together: {_WAY_OUT}"
        )
    for name, tensor in parts.items():
        if tensor.dim() != (2 if name.endswith("weight") else 1) or not tensor.is_floating_point():
            shape = tuple(tensor.shape)
            raise CheckpointError(f"{path}: {name!r} is {shape} {tensor.dtype}, not that of a linear layer; {_WAY_OUT}")
    if len(parts["weight"]) != rows:
        raise CheckpointError(f"{path} has {len(parts['weight'])} rows, but there are {rows} labels; {_WAY_OUT}")
    hidden = parts.get("hidden.weight")
    expected: dict[str, tuple[int, ...]] = {"bias": (rows,)}
    if hidden is not None:
        expected |= {"weight": (rows, len(hidden)), "hidden.bias": (len(hidden),)}
    if any(tuple(parts[name].shape) != shape for name, shape in expected.items() if name in parts):
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in parts.items())
        raise CheckpointError(f"{path} has layers that do not fit together ({shapes}); {_WAY_OUT}")


def verify_folder(folder: Path) -> list[str]:
    """Compute every hash of an output folder again; what is wrong, in words (empty: all is well)."""
    files = read_manifest(folder, any_name=True)["files"]
    wrong = {name: file_problem(folder, name, expected) for name, expected in files.items()}
    problems = [f"{name if name.isprintable() else repr(name)} {what}" for name, what in wrong.items() if what]
    for file in sorted(file for file in folder.rglob("*") if file.is_symlink() or file.is_file()):
        name = file.relative_to(folder).as_posix()
        if name in files or name in (MANIFEST, LOCAL):
            continue
        if file.is_symlink() and leaves(file, folder):
            problems.append(f"{name} is a link that leaves the folder, and was not written by the merge")
        elif not file.is_dir():
            problems.append(f"{name} was not written by the merge")
    return problems


def file_problem(folder: Path, name: str, expected: Mapping[str, Any]) -> str | None:
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
