"""What an output says about this machine alone: where its inputs were, and which inputs a fit has seen.

This file is never pushed and is not in the manifest. Its paths are used only if the hashes that the manifest records
are found there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import CheckpointError
from orthomerge.files.documents import read_json
from orthomerge.files.links import contained

if TYPE_CHECKING:
    from orthomerge.files.checkpoint import Checkpoint
    from orthomerge.files.lora import Adapter
    from orthomerge.models.model import Model


_MOST_BYTES = 64 << 20


def local_document(model: Model, folder: Path) -> dict[str, Any]:
    """Paths of experts by task, and of the base under "", absolute and relative to the output; short hashes of the
    inputs seen, by task.
    """
    experts, places = model.origin.experts, dict(model.origin.places)
    if experts is not None:
        parts = experts.parts
        opened: dict[str, Checkpoint | Adapter] = {"": parts.base} if experts.has_base else {}
        opened |= {task: source.checkpoint for task, source in parts.sources.items()}
        places = {task: str(source.path) for task, source in opened.items() if not source.in_memory}
    seen = {task: list(hashes) for task, hashes in model.origin.inputs.items()}
    return local_places({"places": places, "inputs": seen}, folder) if places or seen else {}


def local_places(local: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What `read_local` gives, as the local file of an output in `folder`."""
    return {**local, "places": {role: _place(Path(place), folder) for role, place in local["places"].items()}}


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
    return {"places": {role: str(_found(place, folder)) for role, place in places.items()}, "inputs": seen}


def _is_place(place: object) -> bool:
    return isinstance(place, dict) and "absolute" in place and all(isinstance(each, str) for each in place.values())


def _found(place: Mapping[str, str], folder: Path) -> Path:
    """Where an input is now: at its absolute path, else at its path relative to the output."""
    here = Path(os.path.abspath(folder))
    tries = [Path(os.path.normpath(here / place[kind])) for kind in ("absolute", "relative") if kind in place]
    return next((path for path in tries if path.exists()), tries[0])


def _place(path: Path, folder: Path) -> dict[str, str]:
    absolute = Path(os.path.abspath(path))
    return {"absolute": str(absolute), "relative": os.path.relpath(absolute, os.path.abspath(folder))}
