"""The manifest of an output folder, read as what it is: a file that anybody may have damaged or written.

Whoever asks for a manifest gets one whose parts have the types that the rest of the program counts on, and whose names
stay inside the folder; anything else is an error that names the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from orthomerge.core.errors import CheckpointError, nearest, some
from orthomerge.data.task import Access
from orthomerge.files.documents import read_json
from orthomerge.files.links import contained, is_plain_name
from orthomerge.files.ownership import MANIFEST
from orthomerge.models.families import FAMILIES
from orthomerge.models.families import family as find_family
from orthomerge.models.family import Family
from orthomerge.models.generic import generic
from orthomerge.models.heads import Activation
from orthomerge.models.kinds import KINDS

FORMAT = 2
HEAD = "head.safetensors"  # in each task's folder
EXTRA = "extra.safetensors"  # beside it, where an aligner adds a module
_WAY_OUT = "the file is damaged: fetch the folder again, or merge again"


def read_manifest(folder: Path, *, any_name: bool = False) -> dict[str, Any]:
    """The manifest of an output folder; without one it is not an output.

    `any_name`: names of files that point out of the folder are no error, for the caller reports them.
    """
    path = folder / MANIFEST
    try:
        present = path.is_file()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; check the folder's permissions") from error
    if not present:
        raise CheckpointError(
            f"{folder} is not an orthomerge output: it has no {MANIFEST}; give the folder that `orthomerge merge` wrote"
        )
    manifest = read_json(contained(path, folder))
    if manifest.get("format") == 1:
        raise CheckpointError(f"{folder} was written by 0.1.0; merge again")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest.get('format')!r:.80}, this version reads {FORMAT}; update orthomerge"
        )
    _check_parts(manifest, path)
    outside = [name for name in manifest["files"] if not is_plain_name(name)]
    if outside and not any_name:
        raise CheckpointError(f"{path} names files outside its own folder: {some(outside)}; do not trust this folder")
    return manifest


def manifest_family(manifest: Mapping[str, Any], folder: Path) -> Family:
    """The family that a manifest names; the poolings of its heads must be that family's."""
    name = manifest["family"]
    if name == "generic":
        family = generic(manifest["encoder"]["prefix"])
    elif name in FAMILIES:
        family = find_family(name)
    else:
        raise CheckpointError(
            f"{folder / MANIFEST} has the model family {name!r:.80}, which this version does not know "
            f"({nearest(name, [*FAMILIES, 'generic'])}); update orthomerge, or fetch the folder again"
        )
    for task, head in manifest["heads"].items():
        if head["pooling"] not in family.poolings:
            raise CheckpointError(
                f"{folder / MANIFEST} has the pooling {head['pooling']!r:.80} for {task!r}, which family {name!r} does "
                f"not have ({nearest(head['pooling'], family.poolings)}); update orthomerge, or fetch the folder again"
            )
    return family


def _check_parts(manifest: dict[str, Any], path: Path) -> None:
    """The types of every part that is read later."""
    words = dict.fromkeys(("orthomerge", "family"), str)
    objects = dict.fromkeys(("encoder", "method", "heads", "inputs", "opening", "tensors", "files"), dict)
    kinds: dict[str, type] = {**words, **objects, "seed": int, "notes": list}
    for part, kind in kinds.items():
        _check(manifest, part, kind, path)
    _check_encoder(manifest["encoder"], manifest["files"], path)
    _check(manifest["method"], "name", str, path, "method.")
    _check(manifest["method"], "parameters", dict, path, "method.")
    for task, head in manifest["heads"].items():
        _check_head(task, head, path)
        names = (HEAD, EXTRA) if head.get("extra") else (HEAD,)
        _check_listed(f"the head of {task!r}", [f"{task}/{name}" for name in names], manifest["files"], path)
    _check_inputs(manifest["inputs"], path)
    for stage in ("fit", "alignment"):
        if stage in manifest:
            _check(manifest, stage, dict, path)
            _check_stage(stage, manifest[stage], path)
    for name, file in manifest["files"].items():
        _check_file(f"the file {name!r:.80}", file, path)


def _check_encoder(encoder: dict[str, Any], files: Mapping[str, Any], path: Path) -> None:
    for part, kind in {"prefix": str, "config": dict, "content": str, "files": list, "processor": list}.items():
        _check(encoder, part, kind, path, "encoder.")
    if not encoder["files"]:
        raise CheckpointError(f"{path} names no file of the encoder; {_WAY_OUT}")
    _check_listed("the encoder", [*encoder["files"], *encoder["processor"]], files, path)


def _check_listed(who: str, names: Iterable[object], files: Mapping[str, Any], path: Path) -> None:
    """Files that are read must be in the table of files, for the others are not verified."""
    for name in names:
        if not isinstance(name, str) or name not in files:
            raise CheckpointError(f"{path}: {who} needs {name!r:.80}, which is not among 'files'; {_WAY_OUT}")


def _check_file(what: str, file: object, path: Path) -> None:
    size, digest = (file.get("size"), file.get("hash")) if isinstance(file, dict) else (None, None)
    if type(size) is not int or not isinstance(digest, str) or ":" not in digest:
        raise CheckpointError(
            f"{path}: {what} must have a 'size' in bytes and a 'hash' of the form ALGORITHM:HEX; {_WAY_OUT}"
        )


def _check_stage(name: str, stage: dict[str, Any], path: Path) -> None:
    """A fit, or an alignment."""
    _check(stage, "tasks", dict, path, f"{name}.")
    if name == "alignment":
        _check(stage, "aligner", str, path, f"{name}.")
    if stage.get("access") not in get_args(Access):
        known = ", ".join(get_args(Access))
        raise CheckpointError(
            f"{path}: '{name}.access' must be one of {known}, got {stage.get('access')!r:.80}; {_WAY_OUT}"
        )


def _check_head(task: str, head: object, path: Path) -> None:
    if not is_plain_name(task) or "/" in task:
        raise CheckpointError(f"{path}: {task!r:.80} cannot name a task's folder; do not trust this folder")
    if not isinstance(head, dict):
        raise CheckpointError(f"{path}: the head of {task!r} must be an object; {_WAY_OUT}")
    labels, where = head.get("labels"), f"heads.{task}."
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise CheckpointError(f"{path}: the head of {task!r} must have 'labels', a list of strings; {_WAY_OUT}")
    for part, kind in {"kind": str, "pooling": str, "normalise": bool, "names": dict}.items():
        _check(head, part, kind, path, where)
    if head["kind"] not in KINDS:
        raise CheckpointError(
            f"{path}: {where + 'kind'!r} is {head['kind']!r:.80}, which this version does not know "
            f"({nearest(head['kind'], KINDS)}); update orthomerge"
        )
    activation, length, extra = (head.get(part) for part in ("activation", "max_length", "extra"))
    sound = {
        "activation": activation in (None, *get_args(Activation)),
        "max_length": length is None or (type(length) is int and 0 < length < 1 << 31),
        "extra": extra is None or isinstance(extra, str),
    }
    for part in (part for part, good in sound.items() if not good):
        raise CheckpointError(f"{path}: {where + part!r} cannot be {head.get(part)!r:.80}; {_WAY_OUT}")
    if any(not isinstance(name, str) for name in head["names"].values()):
        raise CheckpointError(f"{path}: {where}'names' must lead to names of tensors; {_WAY_OUT}")


def _check_inputs(inputs: dict[str, Any], path: Path) -> None:
    """What the model was made of."""
    _check(inputs, "base", dict, path, "inputs.")
    _check(inputs, "experts", dict, path, "inputs.")
    entries: Iterable[tuple[str, Any]] = (
        ("base", inputs["base"]),
        *((f"experts.{task}", entry) for task, entry in inputs["experts"].items()),
    )
    for where, entry in entries:
        if not isinstance(entry, dict):
            raise CheckpointError(f"{path}: 'inputs.{where}' must be an object; {_WAY_OUT}")
        _check(entry, "name", str, path, f"inputs.{where}.")
        _check(entry, "files", list, path, f"inputs.{where}.")
        for file in entry["files"]:
            _check_file(f"a file of 'inputs.{where}'", file, path)


def _check(within: dict[str, Any], part: str, kind: type, path: Path, where: str = "") -> None:
    if part not in within:
        raise CheckpointError(f"{path} has no {where + part!r}; {_WAY_OUT}")
    if not isinstance(within[part], kind):
        wanted = {dict: "an object", list: "a list", int: "a whole number", bool: "true or false"}.get(kind, "a string")
        raise CheckpointError(
            f"{path}: {where + part!r} must be {wanted}, got {type(within[part]).__name__}; {_WAY_OUT}"
        )
