"""What a saved model records of its base and experts, so that nobody names them twice.

The manifest holds hashes and how each expert was opened, but no path. Paths, and short hashes of the inputs that a fit
or an alignment has seen, are in a local file that is never pushed and not in the manifest.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from orthomerge.core.errors import CheckpointError
from orthomerge.files.documents import read_json
from orthomerge.files.folders import contained, leaves
from orthomerge.models.tensors import content_digest

if TYPE_CHECKING:
    from orthomerge.data.task import Examples
    from orthomerge.models.model_data import ModelData
    from orthomerge.models.sources import Opened


_MOST_BYTES = 64 << 20
_CARD = "README.md"
_MOST_CARD, _LONGEST_LICENCE = 64 << 10, 100  # characters
_HEADER = re.compile(r"\ufeff?\s*---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
_LICENCE = re.compile(r"^(license|license_name):(.*(?:\n[ \t]*- .*)*)", re.MULTILINE)
_SHORT = 12  # hexadecimal digits: enough to recognise an input, too few to be worth much to anybody else


def record_of(model: ModelData) -> dict[str, Any]:
    """What the model was made of: from the experts, if they are open, else as it was read."""
    experts = model.origin.experts
    if experts is None:
        empty: dict[str, Any] = {"base": {"name": "", "files": []}, "experts": {}}
        return {"inputs": empty, "opening": {}, "tensors": {}, **model.origin.record}
    parts, opening = experts.parts, experts.opening
    described = {task: asdict(expert) for task, expert in opening.experts.items()}
    left_out = {task: source.split.left_out for task, source in parts.sources.items()}
    return {
        "inputs": {
            "base": _input(experts, "", opening.base or "the first expert"),
            "experts": {task: _input(experts, task, about.pop("path")) for task, about in described.items()},
        },
        "opening": {**vars(opening), "experts": described, "base": experts.has_base},
        "tensors": {
            "merged": len(parts.merged),
            "copied": sorted(parts.copied),
            "left_out": {"base": parts.base_split.left_out, **left_out},
        },
    }


def local_document(model: ModelData, folder: Path) -> dict[str, Any]:
    """Paths of experts by task, and of the base under "", absolute and relative to the output; short hashes of the
    inputs seen, by task.
    """
    experts, places = model.origin.experts, dict(model.origin.places)
    if experts is not None:
        opened = {task: source for task, source in experts.checkpoints().items() if task or experts.has_base}
        places = {task: str(source.path) for task, source in opened.items() if not source.in_memory}
    seen = {task: list(hashes) for task, hashes in model.origin.inputs.items()}
    return local_places({"places": places, "inputs": seen}, folder) if places or seen else {}


def local_places(local: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What `read_local` returns, as the local file of an output in `folder`."""
    here = os.path.abspath(folder)
    paths = {role: os.path.abspath(place) for role, place in local["places"].items()}
    places = {role: {"absolute": path, "relative": os.path.relpath(path, here)} for role, path in paths.items()}
    return {**local, "places": places}


def read_local(folder: Path, name: str) -> dict[str, Any]:
    """The local file of an output, its places as absolute paths; empty where it has none."""
    path = folder / name
    if not path.is_file() and not path.is_symlink():
        return {"places": {}, "inputs": {}}
    document = read_json(contained(path, folder), most=_MOST_BYTES)
    places, seen = document.get("places"), document.get("inputs")
    if not (
        isinstance(places, dict)
        and all(_is_place(place) for place in places.values())
        and isinstance(seen, dict)
        and all(isinstance(each, list) for each in seen.values())
    ):
        raise CheckpointError(f"{path} is damaged; remove it, and give --base and --expert where they are needed")
    return {"places": {role: _current_path(place, folder) for role, place in places.items()}, "inputs": seen}


def short_hashes(examples: Examples) -> tuple[str, ...]:
    """One hash per input, in order."""
    contents = (
        item.encode() if isinstance(item, str) else np.ascontiguousarray(item).tobytes() for item in examples.inputs
    )
    return tuple(hashlib.sha256(content).hexdigest()[:_SHORT] for content in contents)


def licence_of(path: Path, *, reference: str = "", revision: str | None = None) -> str | None:
    """What the header of the model card in a folder says, as text; None where it says nothing, or cannot be read.

    A model of the hub is fetched without its card, so the card is fetched here; if that fails, the licence is unknown.
    """
    if not path.is_dir():  # a bare file: what lies beside it need not be of it
        return None
    card = path / _CARD
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


def _input(experts: Opened, task: str, name: str) -> dict[str, Any]:
    """What identifies an input without telling where on this machine it lay."""
    source = experts.checkpoints()[task]
    if source.in_memory:
        content = content_digest(experts.tensors(task), experts.family.prefix)
        return {"name": name, "revision": None, "license": None, "files": [], "content": content}
    revision = source.revision
    files = [{"name": file.path.name, "size": file.size, "hash": file.digest()} for file in source.files]
    licence = licence_of(source.path, reference=name, revision=revision)
    return {"name": name if revision else Path(name).name, "revision": revision, "license": licence, "files": files}


def _fetched_card(name: str, revision: str) -> Path | None:
    try:
        from huggingface_hub import constants, hf_hub_download

        if constants.HF_HUB_OFFLINE:
            return None
        return Path(hf_hub_download(name, _CARD, revision=revision))
    except Exception:  # noqa: BLE001 - whatever it is: a card is no reason for a merge to fail
        return None


def _is_place(place: object) -> bool:
    return isinstance(place, dict) and "absolute" in place and all(isinstance(each, str) for each in place.values())


def _current_path(place: Mapping[str, str], folder: Path) -> str:
    """Where an input is now: at its absolute path, else at its path relative to the output."""
    paths = [os.path.abspath(folder / place[kind]) for kind in ("absolute", "relative") if kind in place]
    return next((path for path in paths if Path(path).exists()), paths[0])
