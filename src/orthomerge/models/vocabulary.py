"""Whether two folders tokenize with the same words: rows of an embedding table mean nothing without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orthomerge.files.documents import read_json
from orthomerge.files.links import leaves

_MOST_BYTES = 64 << 20
_FILES = ("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "spm.model", "sentencepiece.bpe.model", "bpe.codes")
_WHOLE = "tokenizer.json"


def difference(one: Path, other: Path) -> str | None:
    """How the vocabularies of two folders differ, in words; None where they do not, or where one has none."""
    for name in _FILES:
        first, second = _bytes(one / name), _bytes(other / name)
        if first is not None and second is not None and first.split() != second.split():
            return f"{other / name} is another vocabulary than {one / name}"
    first, second = _bytes(one / _WHOLE), _bytes(other / _WHOLE)
    if first is None or second is None or first == second:
        return None
    # Padding and truncation are saved in it, too; they may differ.
    if _words(one / _WHOLE) != _words(other / _WHOLE):
        return f"{other / _WHOLE} is another vocabulary than {one / _WHOLE}"
    return None


def _bytes(path: Path) -> bytes | None:
    """The file; None if there is none, or one that whoever copies it will refuse."""
    if not path.is_file() or leaves(path, path.parent) or path.stat().st_size > _MOST_BYTES:
        return None
    return path.read_bytes()


def _words(path: Path) -> tuple[Any, Any]:
    document = read_json(path)
    model = document.get("model")
    added = document.get("added_tokens")
    rows = added if isinstance(added, list) else []
    tokens = [(item.get("id"), item.get("content")) for item in rows if isinstance(item, dict)]
    return (model.get("vocab") if isinstance(model, dict) else None), tokens
