"""The manifest of an output folder, read as what it is: a file that anybody may have damaged or written.

Whoever asks for a manifest gets one whose parts have the types that the rest of the program counts on, and whose names
stay inside the folder; anything else is an error that names the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from orthomerge.core.errors import CheckpointError, nearest, some
from orthomerge.data.task import Access
from orthomerge.files.documents import read_json
from orthomerge.files.links import contained, is_plain_name
from orthomerge.files.ownership import MANIFEST
from orthomerge.models.families import FAMILIES, generic
from orthomerge.models.family import Family
from orthomerge.models.heads import Activation
from orthomerge.models.kinds import KINDS

FORMAT = 2
HEAD = "head.safetensors"  # in each task's folder
EXTRA = "extra.safetensors"  # beside it, where an aligner adds a module
_WAY_OUT = "the file is damaged: fetch the folder again, or merge again"


@dataclass(frozen=True)
class _Kind:
    """What a value must be, in words, and whether one is."""

    words: str
    fits: Callable[[Any], bool]


def _one_of(values: Iterable[object]) -> _Kind:
    allowed = list(values)
    words = ", ".join("null" if value is None else str(value) for value in allowed)
    return _Kind(f"one of {words}", lambda value: value in allowed)


_STRING = _Kind("a string", lambda value: isinstance(value, str))
_OBJECT = _Kind("an object", lambda value: isinstance(value, dict))
_LIST = _Kind("a list", lambda value: isinstance(value, list))
_NUMBER = _Kind("a whole number", lambda value: type(value) is int)
_BOOL = _Kind("true or false", lambda value: type(value) is bool)
_HASH = _Kind("a hash of the form ALGORITHM:HEX", lambda value: isinstance(value, str) and ":" in value)
_LENGTH = _Kind("null or a positive whole number", lambda v: v is None or (type(v) is int and 0 < v < 1 << 31))
_ACCESS = _one_of(get_args(Access))

# Nested as the manifest is. A key `*` stands for all, a key that ends with `?` may be absent; a list is one of such.
_FILE = {"size": _NUMBER, "hash": _HASH}
_INPUT = {"name": _STRING, "files": [_FILE]}
_HEAD_SHAPE = {
    "labels": [_STRING],
    "kind": _STRING,
    "pooling": _STRING,
    "normalise": _BOOL,
    "names": {"*": _STRING},
    "activation": _one_of((None, *get_args(Activation))),
    "max_length": _LENGTH,
    "extra?": _Kind("null or a string", lambda value: value is None or isinstance(value, str)),
}
_SHAPE = {
    "orthomerge": _STRING,
    "family": _STRING,
    "encoder": {"prefix": _STRING, "config": _OBJECT, "content": _STRING, "files": [_STRING], "processor": [_STRING]},
    "method": {"name": _STRING, "parameters": _OBJECT},
    "heads": {"*": _HEAD_SHAPE},
    "inputs": {"base": _INPUT, "experts": {"*": _INPUT}},
    "opening": _OBJECT,
    "tensors": _OBJECT,
    "files": {"*": _FILE},
    "seed": _NUMBER,
    "notes": _LIST,
    "fit?": {"tasks": _OBJECT, "access": _ACCESS},
    "alignment?": {"tasks": _OBJECT, "aligner": _STRING, "access": _ACCESS},
}


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
    _check_task_names(manifest.get("heads"), path)
    for name, shape in _SHAPE.items():
        _check_part(manifest, name, shape, path)
    _check_listed(manifest, path)
    outside = [name for name in manifest["files"] if not is_plain_name(name)]
    if outside and not any_name:
        raise CheckpointError(f"{path} names files outside its own folder: {some(outside)}; do not trust this folder")
    return manifest


def manifest_family(manifest: Mapping[str, Any], folder: Path) -> Family:
    """The family that a manifest names; the poolings of its heads must be that family's."""
    name = manifest["family"]
    if name != "generic" and name not in FAMILIES:
        raise CheckpointError(
            f"{folder / MANIFEST} has the model family {name!r:.80}, which this version does not know "
            f"({nearest(name, [*FAMILIES, 'generic'])}); update orthomerge, or fetch the folder again"
        )
    family = generic(manifest["encoder"]["prefix"]) if name == "generic" else FAMILIES[name]
    for task, head in manifest["heads"].items():
        if head["pooling"] not in family.poolings:
            raise CheckpointError(
                f"{folder / MANIFEST} has the pooling {head['pooling']!r:.80} for {task!r}, which family {name!r} does "
                f"not have ({nearest(head['pooling'], family.poolings)}); update orthomerge, or fetch the folder again"
            )
        if head["kind"] not in KINDS:
            raise CheckpointError(
                f"{folder / MANIFEST} has the kind of head {head['kind']!r:.80} for {task!r}, which this version does "
                f"not know ({nearest(head['kind'], KINDS)}); update orthomerge"
            )
    return family


def _check_task_names(heads: object, path: Path) -> None:
    for task in heads if isinstance(heads, dict) else ():
        if not is_plain_name(task) or "/" in task:
            raise CheckpointError(f"{path}: {task!r:.80} cannot name a task's folder; do not trust this folder")


def _check_part(within: Mapping[str, Any], key: str, shape: Any, path: Path, where: str = "") -> None:
    """One key of an object in the manifest, and everything in it."""
    name = key.removesuffix("?")
    if key == "*":
        for each in within:
            _check_value(within[each], shape, path, f"{where}{each}")
    elif name in within:
        _check_value(within[name], shape, path, f"{where}{name}")
    elif name == key:
        raise CheckpointError(f"{path} has no {where + name!r:.200}; {_WAY_OUT}")


def _check_value(value: Any, shape: Any, path: Path, where: str) -> None:
    kind = shape if isinstance(shape, _Kind) else _LIST if isinstance(shape, list) else _OBJECT
    if not kind.fits(value):
        shown = f"{value!r:.80}" if isinstance(value, str | int | float) else type(value).__name__
        raise CheckpointError(f"{path}: {where!r:.200} must be {kind.words}, got {shown}; {_WAY_OUT}")
    if isinstance(shape, list):
        for number, item in enumerate(value, 1):
            _check_value(item, shape[0], path, f"{where}.{number}")
    elif isinstance(shape, dict):
        for key, inner in shape.items():
            _check_part(value, key, inner, path, f"{where}.")


def _check_listed(manifest: Mapping[str, Any], path: Path) -> None:
    """Files that are read must be in the table of files, for the others are not verified."""
    encoder, files = manifest["encoder"], manifest["files"]
    if not encoder["files"]:
        raise CheckpointError(f"{path} names no file of the encoder; {_WAY_OUT}")
    needed = {"the encoder": [*encoder["files"], *encoder["processor"]]}
    for task, head in manifest["heads"].items():
        stored = (HEAD, EXTRA) if head.get("extra") else (HEAD,)
        needed[f"the head of {task!r}"] = [f"{task}/{name}" for name in stored]
    for part, names in needed.items():
        for name in names:
            if name not in files:
                raise CheckpointError(f"{path}: {part} needs {name!r:.80}, which is not among 'files'; {_WAY_OUT}")
