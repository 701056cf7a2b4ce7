"""Mutations of valid files: a seed says everything about one, so that a number is enough to have it again.

Half of them are blind (bits, runs, cuts, splices), half know the format: a header of safetensors or an index is
changed as JSON and put back with its right length, a pickle inside a zip is changed and packed again, and texts get
words that their readers treat in a special way.
"""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Callable
from typing import Any

_NUMBERS = (0, 1, -1, 2, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64, 10**30, 1.5, 1e308, -0.0)
_VALUES: tuple[Any, ...] = (
    *_NUMBERS, True, False, None, "", "x", "..", "../x", "/etc/passwd", "a\0b", "\u202e", "\ud800", "nan", [], {}, [[]],
    [0], [0, 0], {"a": 1}, "F32", "F16", "I64", "F4", "BOOL", "A" * 2000, list(range(70)), ["a", "b"],
)  # fmt: skip
_WORDS: dict[str, tuple[bytes, ...]] = {
    ".yaml": (
        *(b"&a ", b"*a", b"!!python/object/apply:os.system [x]", b"!!binary ", b"!!set ", b"!!omap ", b"!!timestamp "),
        *(b"---\n", b"...\n", b"%YAML 9.9\n", b"<<: ", b"\xff", b"\x00", *(bytes([mark]) for mark in b"{}[]\t'\"#")),
        *(b": ", b"- ", b"? ", b"| ", b"> ", b"1e999", b".nan", b".inf", b"~", b"2020-13-45", b"0o777", b"1:30:00"),
        *(b"experts", b"base", b"method", b"ties", b"scale", b"align", b"fit", b"data", b"vector", b"a + b", b"../x"),
    ),
    ".csv": (
        b'"', b",", b"\r", b"\r\n", b"\0", b"\xef\xbb\xbf", b"\xff", b"text", b"label", b"split", b"-1", b"''", b"\n\n",
    ),
    ".jsonl": (b"{", b"}", b"[", b'"', b"\n", b"null", b"1e999", b"\\ud800", b"\0", b"\xff", b'"text"', b'"label"'),
    ".bin": (
        b"cos\nsystem\n", b"cbuiltins\neval\n", b"c__main__\nX\n",
        *(bytes([code]) for code in b"Rb\x81\x93()t}lduseaQ."),
        b"h\x00", b"q\x00", b"j\xff\xff\xff\xff", b"r\xff\xff\xff\xff", b"X\xff\xff\xff\x7f", b"\x8b\xff\xff\xff\x7f",
        b"\x8a\xff", b"T\xff\xff\xff\xff", b"G" + b"\xff" * 8, b"\x95",
    ),
    ".npz": (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06", b"\x93NUMPY", b"'descr'", b"|O", b"(9, 9)"),
    ".parquet": (b"PAR1", b"\xff" * 4, b"\x15\x00", b"\x7f" * 5),
    ".png": (b"IHDR", b"IDAT", b"IEND", b"\xff" * 4, b"\0" * 4, b"zTXt", b"acTL"),
}  # fmt: skip


def mutate(data: bytes, name: str, draw: random.Random, other: bytes = b"") -> bytes:
    """A variant of a file with this name; `other` is something to splice in."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        data = _once(data, name, draw, other)
    return data


def _once(data: bytes, name: str, draw: random.Random, other: bytes) -> bytes:
    ending = name[name.rindex(".") :]
    knowing: dict[str, Callable[[bytes, random.Random], bytes]] = {
        ".safetensors": _header, ".json": _json, ".bin": _zip, ".npz": _zip, ".jsonl": _json_line,
    }  # fmt: skip
    if ending in knowing and draw.random() < 0.5:
        try:
            return knowing[ending](data, draw)
        except Exception:  # noqa: BLE001 - what was changed before cannot be read any more
            pass
    if ending in _WORDS and draw.random() < 0.5:
        return _insert(data, draw.choice(_WORDS[ending]), draw)
    return _blind(data, draw, other)


def _place(data: bytes, draw: random.Random) -> int:
    """Anywhere, but more often near the start and the end, where formats keep what matters."""
    if draw.random() < 0.3:
        return draw.randrange(min(len(data), 64) + 1)
    if draw.random() < 0.2:
        return len(data) - draw.randrange(min(len(data), 96) + 1)
    return draw.randrange(len(data) + 1)


def _insert(data: bytes, word: bytes, draw: random.Random) -> bytes:
    at = _place(data, draw)
    return data[:at] + word + data[at + draw.choice((0, 0, len(word))) :]


def _blind(data: bytes, draw: random.Random, other: bytes) -> bytes:
    at, length = _place(data, draw), 1 << draw.randrange(9)
    match draw.randrange(9):
        case 0 if data:
            at = min(at, len(data) - 1)
            return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]
        case 1:
            return data[:at] + draw.randbytes(length) + data[at + length :]
        case 2:
            return data[:at] + data[at + length :]
        case 3:
            return data[:at] + data[at : at + length] * draw.choice((2, 3, 50)) + data[at + length :]
        case 4:
            return data[:at]
        case 5:
            return data[:at] + draw.choice((b"\0", b"\xff")) * length + data[at + length :]
        case 6:
            width = draw.choice((1, 2, 4, 8))
            number = int(draw.choice(_NUMBERS)) if draw.random() < 0.7 else draw.getrandbits(64)
            order = draw.choice(("little", "big"))
            return data[:at] + (number % (1 << 8 * width)).to_bytes(width, order) + data[at + width :]  # type: ignore[arg-type]
        case 7:
            source = other or data
            start = draw.randrange(len(source) + 1)
            return data[:at] + source[start : start + length] + data[at + draw.choice((0, length)) :]
        case _:
            return data + draw.randbytes(length)


def _header(data: bytes, draw: random.Random) -> bytes:
    length = int.from_bytes(data[:8], "little")
    changed = _json(data[8 : 8 + length], draw)
    if draw.random() < 0.1:
        length = draw.choice((length, 0, len(changed) + 1, 2**40))
        return length.to_bytes(8, "little") + changed + data[8 + length :]
    return len(changed).to_bytes(8, "little") + changed + data[8 + length :]


def _json(data: bytes, draw: random.Random) -> bytes:
    document = json.loads(data)
    if draw.random() < 0.05:
        return b'{"a":' * draw.choice((10, 3000, 200_000)) + data
    spots = list(_spots(document))
    if not spots:
        return json.dumps(draw.choice(_VALUES)).encode()
    holder, key = draw.choice(spots)
    choice = draw.randrange(6)
    if choice == 0:
        del holder[key]
    elif choice == 1 and isinstance(holder, dict):
        holder[str(draw.choice(_VALUES))[:3000]] = holder.pop(key)
    elif choice == 2:
        source, place = draw.choice(spots)
        holder[key] = json.loads(json.dumps(source.get(place) if isinstance(source, dict) else source[place]))
    elif choice == 3 and type(holder[key]) is int:
        holder[key] += draw.choice((-8, -4, -1, 1, 4, 8))
    elif choice == 4 and isinstance(holder, dict):
        text, name = json.dumps(document), json.dumps(key)  # the same key twice
        at = text.find(name + ":")
        return (text[:at] + name + ": 1, " + text[at:]).encode() if at >= 0 else text.encode()
    else:
        holder[key] = draw.choice(_VALUES)
    return json.dumps(document).encode()


def _spots(document: Any) -> Any:
    """Every (container, key) in a document."""
    todo = [document]
    while todo:
        holder = todo.pop()
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            yield holder, key
            if isinstance(holder[key], dict | list):
                todo.append(holder[key])


def _json_line(data: bytes, draw: random.Random) -> bytes:
    lines = data.split(b"\n")
    place = draw.randrange(len(lines))
    lines[place] = _json(lines[place], draw)
    return b"\n".join(lines)


def _zip(data: bytes, draw: random.Random) -> bytes:
    """The members of an archive, one of them changed, packed again."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = draw.choice(list(members))
    pickles = [each for each in members if each.endswith(".pkl")]
    if pickles and draw.random() < 0.7:
        name = pickles[0]
    match draw.randrange(8):
        case 0:
            members[draw.choice(("../x", "/x", "x" * 300, name + "2", "", "a/../b"))] = members.pop(name)
        case 1:
            del members[name]
        case 2 if pickles:
            members[name] = _insert(members[name], draw.choice(_WORDS[".bin"]), draw)
        case _:
            members[name] = _blind(members[name], draw, data)
    file = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if draw.random() < 0.1 else zipfile.ZIP_STORED
    with zipfile.ZipFile(file, "w", method) as archive:
        for each, content in members.items():
            archive.writestr(each, content)
    return file.getvalue()
