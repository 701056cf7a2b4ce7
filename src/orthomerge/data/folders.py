"""Pictures in folders: split/class/*.png, or class/*.png without splits. They are decoded when looked at."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from orthomerge.core.errors import CheckpointError, some
from orthomerge.data.images import SUFFIXES, decode
from orthomerge.data.inputs import Lazy
from orthomerge.data.raw import Key, Part, Raw, split_named

if TYPE_CHECKING:
    from orthomerge.data.task import Split


_LITTER = ("thumbs.db", "desktop.ini")  # what file managers leave behind; hidden files are theirs, too


def read_folder(folder: Path) -> Raw:
    """A folder of pictures; the names of its folders are the classes. Files beside the folders are not looked at."""
    splits: dict[Split, Path] = {}
    inner = _folders(folder)
    if all(split_named(path.name) for path in inner):
        for path in inner:
            split = split_named(path.name)
            assert split is not None  # noqa: S101 - for mypy: all have just been checked
            if split in splits:
                raise CheckpointError(f"{splits[split]} and {path} are both the {split} split; keep one of them")
            splits[split] = path
    else:
        splits["train"] = folder
    parts: dict[Split, Part] = {}
    first: dict[Key, str] = {}
    for split, path in splits.items():
        files: list[Path] = []
        keys: list[Key] = []
        for home in _folders(path):
            found = _pictures(home)
            files += found
            keys += [home.name] * len(found)
            if found:
                first.setdefault(home.name, str(home))
        if not files:
            raise CheckpointError(
                f"the {split} split {path} is empty: there must be a folder of pictures for every class"
            )
        parts[split] = Part(Lazy(files, _decode), keys)
    classes: list[Key] = sorted({home.name for path in splits.values() for home in _folders(path)})
    return Raw(str(folder), "image", parts, {name: str(name) for name in classes}, first)


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _pictures(home: Path) -> list[Path]:
    entries = sorted(path for path in home.iterdir() if not path.name.startswith("."))
    entries = [path for path in entries if path.name.casefold() not in _LITTER]
    strange = [path for path in entries if path.is_dir() or path.suffix.casefold() not in SUFFIXES]
    if strange:
        raise CheckpointError(
            f"{home} must hold the pictures of one class, got {some(path.name for path in strange)}; "
            "splits are called train, val and test, and hold a folder for every class"
        )
    return entries


def _decode(path: Path) -> object:
    return decode(path, where=str(path))
