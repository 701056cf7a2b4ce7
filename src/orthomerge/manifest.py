"""The manifest of an output folder, read as what it is: a file that anybody may have damaged or written.

Whoever asks for a manifest gets one whose parts have the types that the rest of the program counts on, and whose names
stay inside the folder; anything else is an error that names the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, get_args

from orthomerge.checkpoints.documents import read_json
from orthomerge.checkpoints.publish import MANIFEST
from orthomerge.errors import CheckpointError, nearest, some
from orthomerge.models.families import FAMILIES
from orthomerge.models.families import family as find_family
from orthomerge.models.family import Family
from orthomerge.records import Access

__all__ = [
    "FORMAT",
    "access_class",
    "contained",
    "is_labels",
    "is_plain_name",
    "leaves",
    "manifest_family",
    "read_manifest",
]

FORMAT = 1
_WAY_OUT = "the file is damaged: fetch the folder again, or merge again"


def read_manifest(folder: Path, *, any_name: bool = False) -> dict[str, Any]:
    """The manifest of an output folder; without one it is not an output.

    `any_name`: names of files that point out of the folder are no error, for the caller reports them.
    """
    path = folder / MANIFEST
    try:
        found = path.is_file()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; check the folder's permissions") from error
    if not found:
        raise CheckpointError(
            f"{folder} is not an orthomerge output: it has no {MANIFEST}; give the folder that `orthomerge merge` wrote"
        )
    manifest = read_json(contained(path, folder))
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest.get('format')!r:.80}, this version reads {FORMAT}; update orthomerge"
        )
    _check_parts(manifest, path)
    outside = [name for name in manifest["files"] if not is_plain_name(name)]
    if outside and not any_name:
        raise CheckpointError(f"{path} names files outside its own folder: {some(outside)}; do not trust this folder")
    return manifest


def manifest_family(manifest: dict[str, Any], folder: Path) -> Family:
    """The family that a manifest names; its pooling must be one of that family's."""
    name, pooling = manifest["family"], manifest["pooling"]
    if name == "generic":
        from orthomerge.models.generic import generic

        family = generic(manifest["encoder"]["prefix"])
    elif name in FAMILIES:
        family = find_family(name)
    else:
        raise CheckpointError(
            f"{folder / MANIFEST} has the model family {name!r:.80}, which this version does not know "
            f"({nearest(name, [*FAMILIES, 'generic'])}); update orthomerge, or fetch the folder again"
        )
    if pooling not in family.poolings:
        raise CheckpointError(
            f"{folder / MANIFEST} has the pooling {pooling!r:.80}, which family {name!r} does not have "
            f"({nearest(pooling, family.poolings)}); update orthomerge, or fetch the folder again"
        )
    return family


def access_class(manifest: dict[str, Any]) -> Access:
    """Which inputs the making of an output saw: none, unless it was fitted or its heads were aligned."""
    seen = [manifest[block]["access"] for block in ("fit", "alignment") if block in manifest]
    found: Access = "transductive" if "transductive" in seen else seen[0] if seen else "data-free"
    return found


def is_plain_name(name: str) -> bool:
    """Whether a name is that of a file below the folder, written in the one plain way: `encoder/config.json`."""
    pure = PurePosixPath(name)
    odd = not name.isprintable() or "\\" in name or ".." in pure.parts or pure.is_absolute()
    return not odd and name != "." and pure.as_posix() == name


def is_labels(labels: object) -> bool:
    """Whether something is a list of strings."""
    return isinstance(labels, list) and all(isinstance(label, str) for label in labels)


def leaves(path: Path, folder: Path) -> bool:
    """Whether links lead from a path below a folder to somewhere outside of it; the hub's cache is no such place."""
    real, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    # Inside the hub's cache every file is a link to ../../blobs; a link to anywhere else leaves.
    return real != root and root not in real.parents and real.parent != root.parent.parent / "blobs"


def contained(path: Path, folder: Path) -> Path:
    """The same path, refused if it is a link that leaves its folder."""
    if leaves(path, folder):
        raise CheckpointError(f"{path} is a link that leaves its folder; copy the file there instead, or remove it")
    return path


def _check_parts(manifest: dict[str, Any], path: Path) -> None:
    """The types of every part that is read later."""
    words = dict.fromkeys(("orthomerge", "family", "pooling"), str)
    objects = dict.fromkeys(("encoder", "method", "heads", "inputs", "files"), dict)
    kinds: dict[str, type] = {**words, **objects, "seed": int, "notes": list}
    for part, kind in kinds.items():
        _check(manifest, part, kind, path)
    _check(manifest["encoder"], "prefix", str, path, "encoder.")
    _check(manifest["method"], "name", str, path, "method.")
    _check(manifest["method"], "parameters", dict, path, "method.")
    for task, head in manifest["heads"].items():
        if not is_plain_name(task) or "/" in task:
            raise CheckpointError(f"{path}: {task!r:.80} cannot name a task's folder; do not trust this folder")
        if not isinstance(head, dict) or not is_labels(head.get("labels")):
            raise CheckpointError(f"{path}: the head of {task!r} must have 'labels', a list of strings; {_WAY_OUT}")
    _check_inputs(manifest["inputs"], manifest["heads"], path)
    if "alignment" in manifest:
        _check(manifest, "alignment", dict, path)
        _check(manifest["alignment"], "aligner", str, path, "alignment.")
        _check(manifest["alignment"], "tasks", dict, path, "alignment.")
        access = manifest["alignment"].get("access")
        if access not in get_args(Access):
            known = ", ".join(get_args(Access))
            raise CheckpointError(f"{path}: 'alignment.access' must be one of {known}, got {access!r:.80}; {_WAY_OUT}")
    for name, file in manifest["files"].items():
        size, digest = (file.get("size"), file.get("hash")) if isinstance(file, dict) else (None, None)
        if type(size) is not int or not isinstance(digest, str) or ":" not in digest:
            raise CheckpointError(
                f"{path}: the file {name!r:.80} must have a 'size' in bytes and a 'hash' of the form ALGORITHM:HEX; "
                f"{_WAY_OUT}"
            )


def _check_inputs(inputs: dict[str, Any], tasks: Iterable[str], path: Path) -> None:
    """What the merge was made of: the base, and an expert for every head."""
    _check(inputs, "base", dict, path, "inputs.")
    _check(inputs, "experts", dict, path, "inputs.")
    for task in tasks:
        _check(inputs["experts"], task, dict, path, "inputs.experts.")
    for where, entry in (("base", inputs["base"]), *((f"experts.{task}", inputs["experts"][task]) for task in tasks)):
        _check(entry, "name", str, path, f"inputs.{where}.")
        _check(entry, "files", list, path, f"inputs.{where}.")


def _check(within: dict[str, Any], part: str, kind: type, path: Path, where: str = "") -> None:
    if part not in within:
        raise CheckpointError(f"{path} has no {where + part!r}; {_WAY_OUT}")
    if not isinstance(within[part], kind):
        wanted = {dict: "an object", list: "a list", int: "a whole number"}.get(kind, "a string")
        raise CheckpointError(
            f"{path}: {where + part!r} must be {wanted}, got {type(within[part]).__name__}; {_WAY_OUT}"
        )
