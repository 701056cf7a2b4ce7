"""Run as a program: makes one output of everything, and prints a hash of each; the world around it is the caller's.

Everything that is not the recipe may differ between two callers: threads, hash seed, locale, time zone, shards, the
order of files on disk. What is hashed are the bytes of the output; of its manifest all but the names of input files.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.faults.tiny import TASKS, recipe_for

from orthomerge.api.align import align
from orthomerge.merging.methods import METHODS
from orthomerge.models.encoding import Encoding
from orthomerge.runs.models import write
from orthomerge.runs.sections import Fit

_STEPS = {"steps": 3, "look": 1, "batch": 4}
_OPTIONS: dict[str, dict[str, Any]] = {"wudi": {"steps": 3}, "slerp": {"t": 0.4}}


def digest(out: Path) -> str:
    """Of every file of an output, but for what the manifest says of the files that were read."""
    sha = hashlib.sha256()
    for path in sorted(out.rglob("*"), key=lambda path: path.relative_to(out).as_posix()):
        if not path.is_file():
            continue
        data = path.read_bytes()
        if path.name == "orthomerge.json":
            data = json.dumps(_told(json.loads(data))).encode()
        if path.name not in ("README.md", "orthomerge.local.json"):  # hashes of inputs, and where they were
            sha.update(f"{path.relative_to(out).as_posix()} {len(data)}\n".encode() + data)
    return sha.hexdigest()


def _told(document: Any) -> Any:
    """Without `files`."""
    if isinstance(document, dict):
        return {key: _told(value) for key, value in document.items() if key != "files"}
    return [_told(value) for value in document] if isinstance(document, list) else document


def outputs(folder: Path, place: Path) -> Iterator[tuple[str, Path]]:
    """Every method that needs no data, two aligners, two fits."""
    plain = recipe_for(folder, seed=3)
    for name in METHODS:
        recipe = replace(plain, method=name, parameters=_OPTIONS.get(name, {}))
        yield name, write(recipe, out=place / name).out
    data: Any = {task: str(folder / f"{task}.csv") for task in TASKS}
    for aligner in ("ridge", "kl-map", "aligned-c", "orthogonal"):
        align(place / "average", data, aligner=aligner, encoding=Encoding(device="cpu")).save(place / aligner)
        yield f"align {aligner}", place / aligner
    for name in ("moma", "realign"):
        recipe = replace(plain, method=name, parameters=_STEPS, fit=Fit(data, device="cpu"))
        yield f"fit {name}", write(recipe, out=place / name).out


if __name__ == "__main__":
    _folder, _place = map(Path, sys.argv[1:])
    print(json.dumps({name: digest(out) for name, out in outputs(_folder, _place)}))
