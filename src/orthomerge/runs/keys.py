"""Keys of results: a hash of everything that their content depends on, and of nothing else.

Inputs count by content, so a key is the same wherever files lie and whenever they were written. Where and how a result
is computed is no part of it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.core.version import VERSION
from orthomerge.files.ownership import names_in
from orthomerge.files.paths import RawFile
from orthomerge.models.manifest import README
from orthomerge.models.processors import COMPANIONS

if TYPE_CHECKING:
    from orthomerge.data.task import Task
    from orthomerge.files.checkpoint import Checkpoint
    from orthomerge.files.lora import Adapter
    from orthomerge.models.experts import Experts
    from orthomerge.runs.blocks import Evaluate
    from orthomerge.runs.recipe import Align, Fit, Merge, Recipe

# Beside the weights, what a merge reads of a checkpoint.
_DOCUMENTS = ("config.json", "adapter_config.json", README, *COMPANIONS)
_COMPUTE = ("device", "batch", "precision", "resume", "save_every")


def key_of(*parts: Any) -> str:
    """The hash of plain data and of the code that makes a result of it."""
    content = [VERSION, version("torch"), *parts]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def merge_key(recipe: Recipe, merge: Merge, experts: Experts) -> str:
    """Of a merge or a fit of a recipe's experts."""
    fit = None if merge.fit is None else section_content(merge.fit)
    return key_of({**vars(merge), "fit": fit}, _experts_content(recipe, experts), recipe.target.max_shard_size)


def section_content(section: Fit | Align | Evaluate) -> dict[str, Any]:
    """A section with its inputs by content, without what only says how it is computed."""
    content = {name: value for name, value in asdict(section).items() if name not in ("data", *_COMPUTE)}
    return {**content, "data": [(task, source_digest(source)) for task, source in section.data.items()]}


def source_digest(source: str | Task) -> str:
    """Of a task's data: a file, a folder with all below it, a task in memory; of a dataset of the hub, its name."""
    if not isinstance(source, str):
        parts = sorted(source.splits.items())
        labels = {split: None if part.labels is None else part.labels.tolist() for split, part in parts}
        return key_of(source.labels, labels, {split: part.digest() for split, part in parts})
    path = Path(source).expanduser()
    if path.is_file():
        return file_digest(path)
    if not path.is_dir():
        return source
    return key_of([(name, file_digest(path / name)) for name in sorted(names_in(path)) if (path / name).is_file()])


def file_digest(path: Path) -> str:
    """Of one file, which is read once as long as nobody writes to it."""
    status = path.stat()
    return _digest(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


@lru_cache(maxsize=1 << 16)
def _digest(path: Path, *stamp: int) -> str:
    """A file's time of change cannot be set back, so `stamp` is another one after any write."""
    return RawFile(path).digest()


def _experts_content(recipe: Recipe, experts: Experts) -> list[Any]:
    """Base and experts by content, and how they are opened."""
    checkpoints = experts.checkpoints()
    opening = {name: value for name, value in vars(recipe.opening).items() if name not in ("experts", "base")}
    base = None if recipe.base is None else _checkpoint_digest(checkpoints["base"])
    opened = [
        (task, {**asdict(expert), "path": _checkpoint_digest(checkpoints[f"expert {task}"])})
        for task, expert in recipe.tasks.items()
    ]
    return [opening, base, opened]


def _checkpoint_digest(opened: Checkpoint | Adapter) -> str:
    """Of a model, adapter or file of weights, with the documents beside it."""
    path = opened.path
    beside = [path / name for name in _DOCUMENTS if path.is_dir() and (path / name).is_file()]
    files = [*(file.path for file in opened.files), *beside]
    return key_of(path.name, opened.revision, [(file.name, file_digest(file)) for file in files])
