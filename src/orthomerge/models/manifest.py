"""Reading, checking and contents of the manifest of a model folder (layout: docs/checkpoints.md).

Beside it, `orthomerge.local.json` has the paths of the experts on this machine, and short hashes of the inputs that a
fit or an alignment used. It is never pushed and not in the manifest.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np

from orthomerge.core.errors import CheckpointError, nearest, some
from orthomerge.data.task import Access, Examples
from orthomerge.files.documents import is_plain_name, read_json
from orthomerge.files.folders import LOCAL, MANIFEST, contained, leaves
from orthomerge.models.families import FAMILIES, generic
from orthomerge.models.family import Family
from orthomerge.models.heads import KINDS, Activation
from orthomerge.models.model_data import ModelData
from orthomerge.models.sources import Opened
from orthomerge.models.tensors import content_digest

FORMAT = 2
ENCODER = "encoder"  # stem of the encoder's files
HEAD = "head.safetensors"
EXTRA = "extra.safetensors"
README = "README.md"
FACTS = ("method", "seed", "vector", "notes", "fit", "alignment", "evaluation")  # copied from `Origin.facts`
RECORD = ("inputs", "opening", "tensors")  # from `record_of`
HEAD_FIELDS = ("kind", "pooling", "max_length", "activation", "normalise")  # fields of `Head` that are not tensors
_WAY_OUT = "the file is damaged: fetch the folder again, or merge again"
_WORDS = {str: "a string", int: "a whole number", bool: "true or false", dict: "an object", list: "a list"}
_MOST_CARD, _LONGEST_LICENCE = 64 << 10, 100  # characters
_HEADER = re.compile(r"\ufeff?\s*---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
_LICENCE = re.compile(r"^(license|license_name):(.*(?:\n[ \t]*- .*)*)", re.MULTILINE)
_SHORT = 12  # hexadecimal digits: enough to recognise an input, too few to guess it from

# A schema: a type, a tuple of allowed types and values, a list with the schema of its items, or a dict with a schema
# per key. The key `*` stands for all keys; a key that ends with `?` may be absent.
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
_LOCAL_SHAPE = {"places": {"*": {"absolute": str, "relative?": str}}, "inputs": {"*": list}}


def read_manifest(folder: Path) -> dict[str, Any]:
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
        raise CheckpointError(f"{folder} was written by orthomerge 0.1.0, which this version cannot read; merge again")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} must have format {FORMAT}, got {manifest.get('format')!r:.80}; update orthomerge"
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
    """Return the family of a model folder; check that the family, the poolings and the kinds of heads exist."""
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
    """Check a value and all nested values against a schema; `where`: the path of keys to it, for messages."""
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
            for present in value if key == "*" else value.keys() & {name}:
                _check(value[present], inner, path, f"{where}.{present}".lstrip("."))


def _check_listed(manifest: Mapping[str, Any], path: Path) -> None:
    """Check that all files of encoder and heads are listed, because only listed files are verified."""
    encoder, heads = manifest["encoder"], manifest["heads"]
    if not encoder["files"]:
        raise CheckpointError(f"{path} names no file of the encoder; {_WAY_OUT}")
    needed = [*encoder["files"], *encoder["processor"], *(f"{task}/{HEAD}" for task in heads)]
    needed += [f"{task}/{EXTRA}" for task, head in heads.items() if head.get("extra")]
    if missing := [name for name in needed if name not in manifest["files"]]:
        raise CheckpointError(f"{path} needs {some(missing)}, not listed among its 'files'; {_WAY_OUT}")


def record_of(model: ModelData) -> dict[str, Any]:
    """Record hashes and options of base and experts, without paths; copied if the experts are not open."""
    experts = model.origin.experts
    if experts is None:
        empty: dict[str, Any] = {"base": {"name": "", "files": []}, "experts": {}}
        return {"inputs": empty, "opening": {}, "tensors": {}, **model.origin.record}
    parts, opening = experts.parts, experts.opening
    described = {task: asdict(expert) for task, expert in opening.experts.items()}
    return {
        "inputs": {
            "base": _input(experts, "", opening.base or "the first expert"),
            "experts": {task: _input(experts, task, expert.pop("path")) for task, expert in described.items()},
        },
        "opening": {**vars(opening), "experts": described, "base": experts.has_base},
        "tensors": {
            "merged": len(parts.merged),
            "copied": sorted(parts.copied),
            "left_out": {
                "base": parts.base_split.left_out,
                **{task: source.split.left_out for task, source in parts.sources.items()},
            },
        },
    }


def _input(experts: Opened, task: str, name: str) -> dict[str, Any]:
    source = experts.checkpoints()[task]
    if source.in_memory:
        content = content_digest(experts.tensors(task), experts.family.prefix)
        return {"name": name, "revision": None, "license": None, "files": [], "content": content}
    revision = source.revision
    return {
        "name": name if revision else Path(name).name,
        "revision": revision,
        "license": licence_of(source.path, reference=name, revision=revision),
        "files": [{"name": file.path.name, "size": file.size, "hash": file.digest()} for file in source.files],
    }


def licence_of(path: Path, *, reference: str = "", revision: str | None = None) -> str | None:
    """Read the licence from the model card of a folder, or else of its hub revision; None if unknown."""
    if not path.is_dir():  # a bare file: a card beside it may be of another model
        return None
    card = path / README
    if not card.is_file() and revision is not None:
        card = _fetched_card(reference.partition("@")[0], revision) or card
    elif leaves(card, path):
        return None
    try:
        with card.open(encoding="utf-8", errors="replace") as file:
            header = _HEADER.match(file.read(_MOST_CARD))
    except OSError:
        return None
    # Two plain keys: a whole YAML document could be a bomb.
    fields = {name: re.split(r"[,\n]", value) for name, value in _LICENCE.findall(header[1] if header else "")}
    names, (own_name, *_) = fields.get("license", []), fields.get("license_name", [""])
    licence = ", ".join(filter(None, (name.strip(" \t\r-[]'\"") for name in names)))
    if licence == "other" and own_name.strip():
        licence = f"other ({own_name.strip()})"
    return "".join(char for char in licence if char.isprintable())[:_LONGEST_LICENCE] or None


def _fetched_card(name: str, revision: str) -> Path | None:
    try:
        from huggingface_hub import constants, hf_hub_download

        if constants.HF_HUB_OFFLINE:
            return None
        return Path(hf_hub_download(name, README, revision=revision))
    except Exception:  # noqa: BLE001 - a merge must not fail for lack of a card
        return None


def local_document(model: ModelData, folder: Path) -> dict[str, Any]:
    """Content of the local file of an output in `folder`; empty if there are no paths and no inputs."""
    experts, places = model.origin.experts, dict(model.origin.places)
    if experts is not None:
        opened = {task: source for task, source in experts.checkpoints().items() if task or experts.has_base}
        places = {task: str(source.path) for task, source in opened.items() if not source.in_memory}
    inputs = {task: list(hashes) for task, hashes in model.origin.inputs.items()}
    return local_places({"places": places, "inputs": inputs}, folder) if places or inputs else {}


def local_places(local: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Convert the result of `read_local` to the local file of an output in `folder`: absolute and relative paths."""
    places = {}
    for role, place in local["places"].items():
        path = os.path.abspath(place)
        places[role] = {"absolute": path, "relative": os.path.relpath(path, os.path.abspath(folder))}
    return {**local, "places": places}


def read_local(folder: Path) -> dict[str, Any]:
    """Read the local file of an output, if there is one: absolute paths (the base's under ""), and inputs."""
    path = folder / LOCAL
    if not path.is_file() and not path.is_symlink():
        return {"places": {}, "inputs": {}}
    document = read_json(contained(path, folder))
    try:
        _check(document, _LOCAL_SHAPE, path, "")
    except CheckpointError as error:
        message = f"{path} is damaged; remove it, and give --base and --expert if they are asked for"
        raise CheckpointError(message) from error
    places = {}
    for role, place in document["places"].items():
        paths = [os.path.abspath(folder / place[kind]) for kind in ("absolute", "relative") if kind in place]
        places[role] = next((path for path in paths if Path(path).exists()), paths[0])
    return {"places": places, "inputs": document["inputs"]}


def short_hashes(examples: Examples) -> tuple[str, ...]:
    contents = (
        item.encode() if isinstance(item, str) else np.ascontiguousarray(item).tobytes() for item in examples.inputs
    )
    return tuple(hashlib.sha256(content).hexdigest()[:_SHORT] for content in contents)
