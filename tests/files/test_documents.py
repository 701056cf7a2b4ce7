"""JSON beside the weights: an object with every key once, of believable size, or an error that names the file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from orthomerge.core.errors import CheckpointError
from orthomerge.files import documents
from orthomerge.files.documents import parse_json, read_json, write_bytes, write_json


def test_documents_are_written_once_and_in_full(tmp_path: Path) -> None:
    document = {"label": "schön", "half a pair": "\ud83d"}
    write_json(tmp_path / "x.json", document)
    assert read_json(tmp_path / "x.json") == document
    assert "schön" in (tmp_path / "x.json").read_text(encoding="utf-8")
    with pytest.raises(FileExistsError):
        write_bytes(tmp_path / "x.json", b"")


BROKEN = {
    "empty": (b"", r"x is not valid JSON .*; the file is damaged: fetch it again"),
    "cut short": (b'{"a": 1', "x is not valid JSON"),
    "not UTF-8": (b'{"a": "\xff"}', "x is not valid JSON .*utf-8"),
    "byte order mark": (b'\xef\xbb\xbf{"a": 1}', "x is not valid JSON .*BOM"),
    "nested": (b'{"a":' + b"[" * 200_000, r"x is not valid JSON \(maximum recursion depth"),
    "endless number": (b'{"a": ' + b"1" * 5_000 + b"}", r"x is not valid JSON .*4300"),
    "a list": (b"[1]", "x must be a JSON object, got list"),
    "nothing": (b"null", "x must be a JSON object, got NoneType"),
    "twice": (b'{"a": 1, "b": 2, "a": 3}', "x has the key 'a' twice; do not trust this file"),
    "twice inside": (b'{"a": [{"b": 1, "b": 1}]}', "x has the key 'b' twice"),
    "twice in disguise": (b'{"a": 1, "\\u0061": 2}', "x has the key 'a' twice"),
}


@pytest.mark.parametrize(("data", "match"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_documents(data: bytes, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        parse_json(data, "x")


def test_a_key_given_twice_among_very_many_is_found_at_once() -> None:
    names = [f'"{number}": 0' for number in range(200_000)] + ['"199999": 1']
    started = time.process_time()
    with pytest.raises(CheckpointError, match="has the key '199999' twice"):
        parse_json(("{" + ",".join(names) + "}").encode(), "x")
    assert time.process_time() - started < 5


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    for odd in (tmp_path / "nowhere", tmp_path, tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(CheckpointError, match=f"{odd}( is not|: No such)"):
            read_json(odd)
    (tmp_path / "large.json").write_text('{"a": 1}')
    monkeypatch.setattr(documents, "_MAX_BYTES", 7)
    with pytest.raises(CheckpointError, match=r"large.json must have at most 7 bytes, got 8; give a smaller file"):
        read_json(tmp_path / "large.json")
    monkeypatch.setattr(documents, "_MAX_BYTES", 8)
    assert read_json(tmp_path / "large.json") == {"a": 1}
