"""The layout of a model folder and its manifest, read as what it is: a file that anybody may have damaged or written.

OUT/encoder.safetensors        the only large file (or shards); names as in the stock classifier
OUT/tokenizer.json ...         tokenizer or image processor
OUT/TASK/head.safetensors      the head; with an aligner that adds a module, extra.safetensors beside it
OUT/TASK/config.json           only where a stock class computes what the head does: that class loads this folder,
                               through an index and links to the encoder and the tokenizer above it
OUT/README.md                  model card
OUT/orthomerge.json            manifest: inputs with hashes, how they were opened, method, the hash of every other file
OUT/orthomerge.local.json      where experts were on this machine; never pushed, not in the manifest
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, get_args

from orthomerge.core.errors import CheckpointError, nearest, some
from orthomerge.data.task import Access
from orthomerge.files.documents import is_plain_name, read_json
from orthomerge.files.folders import MANIFEST, contained
from orthomerge.models.families import FAMILIES, generic
from orthomerge.models.family import Family
from orthomerge.models.heads import KINDS, Activation

FORMAT = 2
ENCODER = "encoder"  # what the names of the encoder's files start with
HEAD = "head.safetensors"
EXTRA = "extra.safetensors"
README = "README.md"
FACTS = ("method", "seed", "vector", "notes", "fit", "alignment", "evaluation")  # how the model was made
RECORD = ("inputs", "opening", "tensors")  # of what
HEAD_FIELDS = ("kind", "pooling", "max_length", "activation", "normalise")  # those of `Head` that are no tensors
_WAY_OUT = "the file is damaged: fetch the folder again, or merge again"
_WORDS = {str: "a string", int: "a whole number", bool: "true or false", dict: "an object", list: "a list"}

# Nested as the manifest is: a type, or a tuple of types and values. A key `*` stands for all, a key that ends with `?`
# may be absent; a list is one of such.
_FILE = {"size": int, "hash": str}
_INPUT = {"name": str, "files": [_FILE]}
_STAGE = {"tasks": dict, "access": get_args(Access)}
_SHAPE = {
    "orthomerge": str,
    "family": str,
    "encoder": {"prefix": str, "config": dict, "content": str, "files": [str], "processor": [str]},
    "method": {"name": str, "parameters": dict},
    "heads": {
        "*": {
            "labels": [str],
            "kind": str,
            "pooling": str,
            "normalise": bool,
            "names": {"*": str},
            "activation": (None, *get_args(Activation)),
            "max_length": (None, int),
            "extra?": (None, str),
        }
    },
    "inputs": {"base": _INPUT, "experts": {"*": _INPUT}},
    "opening": dict,
    "tensors": dict,
    "files": {"*": _FILE},
    "seed": int,
    "notes": list,
    "fit?": _STAGE,
    "alignment?": {**_STAGE, "aligner": str},
}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check the manifest of an output folder."""
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
    _check(manifest, _SHAPE, path, "")
    for task in manifest["heads"]:
        if not is_plain_name(task) or "/" in task:
            raise CheckpointError(f"{path}: {task!r:.80} cannot name a task's folder; do not trust this folder")
    _check_listed(manifest, path)
    if outside := [name for name in manifest["files"] if not is_plain_name(name)]:
        raise CheckpointError(f"{path} names files outside its own folder: {some(outside)}; do not trust this folder")
    return manifest


def manifest_family(manifest: Mapping[str, Any], folder: Path) -> Family:
    """Family of a model folder; checks that the family, the poolings and the kinds of heads exist."""
    name = manifest["family"]
    _check_known(folder, "model family", name, [*FAMILIES, "generic"])
    family = generic(manifest["encoder"]["prefix"]) if name == "generic" else FAMILIES[name]
    for task, head in manifest["heads"].items():
        _check_known(folder, f"pooling of {task!r} (family {name})", head["pooling"], family.poolings)
        _check_known(folder, f"kind of head of {task!r}", head["kind"], KINDS)
    return family


def _check_known(folder: Path, what: str, name: str, names: Collection[str]) -> None:
    if name not in names:
        raise CheckpointError(
            f"{folder / MANIFEST}: this version does not know the {what}, {name!r:.80}; {nearest(name, names)}; update "
            "orthomerge, or fetch the folder again"
        )


def _check(value: Any, shape: Any, path: Path, where: str) -> None:
    """Check a value and everything in it; `where`: the keys that lead to it."""
    options = shape if isinstance(shape, tuple) else (type(shape) if isinstance(shape, dict | list) else shape,)
    if not any(type(value) is option if isinstance(option, type) else value == option for option in options):
        words = " or ".join("null" if option is None else _WORDS.get(option, str(option)) for option in options)
        shown = f"{value!r:.80}" if isinstance(value, str | int | float) else type(value).__name__
        raise CheckpointError(f"{path}: {where!r:.200} must be {words}, got {shown}; {_WAY_OUT}")
    if isinstance(shape, list):
        for number, item in enumerate(value, 1):
            _check(item, shape[0], path, f"{where}.{number}")
    elif isinstance(shape, dict):
        for key, inner in shape.items():
            name = key.removesuffix("?")
            if name == key != "*" and name not in value:
                raise CheckpointError(f"{path} has no {f'{where}.{name}'.lstrip('.')!r:.200}; {_WAY_OUT}")
            for each in value if key == "*" else value.keys() & {name}:
                _check(value[each], inner, path, f"{where}.{each}".lstrip("."))


def _check_listed(manifest: Mapping[str, Any], path: Path) -> None:
    """Check that all files that are read are listed: only listed files are verified."""
    encoder, heads = manifest["encoder"], manifest["heads"]
    if not encoder["files"]:
        raise CheckpointError(f"{path} names no file of the encoder; {_WAY_OUT}")
    needed = [*encoder["files"], *encoder["processor"], *(f"{task}/{HEAD}" for task in heads)]
    needed += [f"{task}/{EXTRA}" for task, head in heads.items() if head.get("extra")]
    if missing := [name for name in needed if name not in manifest["files"]]:
        raise CheckpointError(f"{path} needs {some(missing)}, not listed among its 'files'; {_WAY_OUT}")
