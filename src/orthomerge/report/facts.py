"""What was merged, from manifests or, where there are none, from the records; every part of it may be missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orthomerge.core.table import Cell, Column, Table
from orthomerge.evaluation.records import Record
from orthomerge.report.reading import Material
from orthomerge.report.tables import REFERENCES

_HEX = 12


_PARTS = (Column("part"), Column("name"), Column("labels"), Column("size", "right"), Column("hash"))
_MERGES = (Column("method"), Column("options", wrap=True), Column("has seen"), Column("hash"))

_Cells = tuple[Cell, ...]


def merged_tables(material: Material) -> list[Table]:
    """For each set of parts: the files that went in, and the merges of them; without manifests, merges alone."""
    groups: dict[tuple[str, tuple[_Cells, ...]], dict[_Cells, None]] = {}
    for block in material.manifests.values():
        key = (str(block.get("family") or ""), tuple(_parts(block)))
        groups.setdefault(key, {})[_merge(block)] = None
    tables = []
    for (family, parts), merges in groups.items():
        if parts:
            tables.append(Table(f"Parts (family {family})" if family else "Parts", _PARTS, parts))
        tables.append(Table("Merges", _MERGES, tuple(merges)))
    if not groups and (rows := _from_records(material.records)):
        tables.append(Table("Merges", tuple(column for column in _MERGES if column.name != "has seen"), tuple(rows)))
    return tables


def versions_of(material: Material) -> dict[str, str]:
    """Of the run, else of the records."""
    if material.info and material.info.versions:
        return dict(material.info.versions)
    found: dict[str, str] = {}
    for record in material.records:
        found |= record.versions
    return found


def size_of(size: object) -> str:
    """Bytes as a person says them."""
    if not isinstance(size, int | float) or isinstance(size, bool) or size < 0:
        return ""
    amount = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def time_of(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def listed(values: object) -> str:
    """Options as `scale = 0.3, density = 0.2`."""
    if not isinstance(values, Mapping):
        return "" if values is None else str(values)
    return ", ".join(f"{name} = {_plain(value)}" for name, value in values.items() if value is not None)


def numbers_of(numbers: Mapping[str, float]) -> list[tuple[str, str]]:
    """Names and numbers; `x`, `x, low` and `x, high` are one: `1.5 (1.2 to 1.8)`."""
    found = []
    for name, value in numbers.items():
        stem, _, end = name.rpartition(", ")
        if end in ("low", "high") and stem in numbers:
            continue
        low, high = numbers.get(f"{name}, low"), numbers.get(f"{name}, high")
        span = "" if low is None or high is None else f" ({_short(low)} to {_short(high)})"
        found.append((name, f"{_short(value)}{span}"))
    return found


def _short(value: float) -> str:
    """Three digits, as they are told in a sentence."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return "0" if value == 0 else f"{value:#.3g}".removesuffix(".")


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return f"({listed(value)})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _parts(block: Mapping[str, Any]) -> list[_Cells]:
    inputs, heads = _mapping(block.get("inputs")), _mapping(block.get("heads"))
    base = _mapping(inputs.get("base"))
    found = [_part("base", base, "")] if base else []
    for task, entry in _mapping(inputs.get("experts")).items():
        found.append(_part(f"expert {task}", _mapping(entry), _labels(_mapping(heads.get(task)).get("labels"))))
    return found


def _part(role: str, entry: Mapping[str, Any], labels: str) -> _Cells:
    given = entry.get("files")
    files = [_mapping(file) for file in given] if isinstance(given, list | tuple) else []
    digest = str(files[0].get("hash") or "") if len(files) == 1 else ""
    if len(files) > 1:
        digest = f"{len(files)} files"
    sizes = [file.get("size") for file in files]
    total = sum(size for size in sizes if isinstance(size, int))
    digest = digest or str(entry.get("hash") or "")
    revision = f" @ {entry['revision']}" if entry.get("revision") else ""
    size = size_of(total) if total else ""
    return Cell(role), Cell(f"{entry.get('name') or ''}{revision}"), Cell(labels), Cell(size), _digest(digest)


def _digest(digest: str) -> Cell:
    """Its beginning, without the name of the algorithm."""
    return Cell(digest.rpartition(":")[2][:_HEX], digest or None)


def _labels(labels: object, *, most: int = 4) -> str:
    if not isinstance(labels, list | tuple):
        return ""
    rest = f", … ({len(labels)})" if len(labels) > most else ""
    return ", ".join(map(str, labels[:most])) + rest


def _merge(block: Mapping[str, Any]) -> _Cells:
    method = block.get("method")
    name = str(_mapping(method).get("name") or "") if isinstance(method, Mapping) else str(method or "")
    parameters = _mapping(method).get("parameters", block.get("parameters"))
    encoder = _mapping(block.get("encoder")).get("content")
    seen = [text for text in (_seen(block, "fit", "fitted"), _seen(block, "alignment", "aligned")) if text]
    told = "; ".join(seen) or "no inputs"
    return Cell(name), Cell(listed(parameters) or "–"), Cell(told), _digest(str(encoder or ""))


def _seen(block: Mapping[str, Any], part: str, verb: str) -> str:
    found = _mapping(block.get(part))
    if not found:
        return ""
    counts = [_mapping(task).get("inputs") for task in _mapping(found.get("tasks")).values()]
    known = [count for count in counts if isinstance(count, int)]
    how = f" by {found['aligner']}" if found.get("aligner") else ""
    many = f"{min(known)}–{max(known)}" if known and min(known) != max(known) else str(known[0]) if known else ""
    told = [f"{many} inputs a task" if many else "inputs", f"from {found['split']}" if found.get("split") else ""]
    access = f" ({found['access']})" if found.get("access") else ""
    return f"{verb}{how} on {' '.join(filter(None, told))}{access}"


def _from_records(records: Sequence[Record]) -> list[_Cells]:
    """Methods with their parameters; the digest only where all tasks share one model."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record.method not in REFERENCES:
            found.setdefault(record.method, []).append(record)
    merges: list[_Cells] = []
    for method, own in found.items():
        digests = {record.inputs.get("model", "") for record in own}
        digest = digests.pop() if len(digests) == 1 else ""
        merges.append((Cell(method), Cell(listed(own[0].parameters) or "–"), _digest(digest)))
    return merges
