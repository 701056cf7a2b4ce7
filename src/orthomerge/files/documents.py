"""Read JSON files, with a limit on their size and without duplicate keys, and write them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any

from orthomerge.core.errors import CheckpointError
from orthomerge.files.raw_file import RawFile

_MAX_BYTES = 64 << 20


def read_json(path: Path) -> dict[str, Any]:
    return parse_json(RawFile(path).whole(_MAX_BYTES), str(path))


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """Parse an object from bytes; a duplicate key is an error, because either value could be meant."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        document = dict(pairs)
        if len(document) != len(pairs):
            duplicate = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise CheckpointError(f"{what} has the key {duplicate!r} twice; do not trust this file")
        return document

    try:
        document = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8, and numbers of thousands of digits
        raise CheckpointError(f"{what} is not valid JSON ({error}); the file is damaged: fetch it again") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{what} must be a JSON object, got {type(document).__name__}; fetch it again")
    return document


def json_bytes(document: Any) -> bytes:
    """Encode a document as indented UTF-8; lone surrogates, which JSON allows, are escaped."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def write_json(path: Path, document: Any) -> None:
    write_bytes(path, json_bytes(document))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a new file; an existing one is an error."""
    with path.open("xb") as file:
        file.write(data)


def is_plain_name(name: str) -> bool:
    """Return whether a name is a normalised relative path without `..`, such as `topic/config.json`."""
    pure = PurePosixPath(name)
    unsafe = not name.isprintable() or "\\" in name or ".." in pure.parts or pure.is_absolute()
    return not unsafe and name != "." and pure.as_posix() == name
