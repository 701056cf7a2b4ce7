"""What was merged, from manifests or, where there are none, from the records; and numbers as people write them.

Manifests may have been written by anybody: every part of them may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orthomerge.core.table import Cell, Column, Table
from orthomerge.evaluation.records import Record
from orthomerge.report.material import Material
from orthomerge.report.tables import REFERENCES

_HEX = 12  # digits of a hash
_LABELS = 4
_PARTS = (Column("part"), Column("name"), Column("labels"), Column("size", "right"), Column("hash"))
_MERGES = (Column("method"), Column("options", wrap=True), Column("has seen"), Column("hash"))

_Cells = tuple[Cell, ...]


def merged_tables(material: Material) -> list[Table]:
    """For each set of parts: the files that went in, and the merges of them; without manifests, merges alone."""
    groups: dict[tuple[str, tuple[_Cells, ...]], dict[_Cells, None]] = {}
    for manifest in material.manifests:
        key = (str(manifest.get("family") or ""), tuple(_parts(manifest)))
        groups.setdefault(key, {})[_merge(manifest)] = None
    tables = []
    for (family, parts), merges in groups.items():
        if parts:
            tables.append(Table(f"Parts (family {family})" if family else "Parts", _PARTS, parts))
        tables.append(Table("Merges", _MERGES, tuple(merges)))
    if not groups and (rows := _recorded_merges(material.records)):
        tables.append(Table("Merges", tuple(column for column in _MERGES if column.name != "has seen"), rows))
    return tables


def _parts(manifest: Mapping[str, Any]) -> list[_Cells]:
    inputs, heads = _mapping(manifest.get("inputs")), _mapping(manifest.get("heads"))
    base = _mapping(inputs.get("base"))
    rows = [_part("base", base, "")] if base else []
    for task, expert in _mapping(inputs.get("experts")).items():
        rows.append(_part(f"expert {task}", _mapping(expert), _labels(_mapping(heads.get(task)).get("labels"))))
    return rows


def _part(role: str, entry: Mapping[str, Any], labels: str) -> _Cells:
    listed_files = entry.get("files")
    files = [_mapping(file) for file in listed_files] if isinstance(listed_files, list | tuple) else []
    total = sum(size for file in files if isinstance(size := file.get("size"), int))
    if len(files) > 1:
        digest = f"{len(files)} files"
    else:
        digest = str((files[0].get("hash") if files else None) or entry.get("hash") or "")
    revision = f" @ {entry['revision']}" if entry.get("revision") else ""
    name = Cell(f"{entry.get('name') or ''}{revision}")
    return Cell(role), name, Cell(labels), Cell(size_of(total) if total > 0 else ""), _digest(digest)


def _digest(digest: str) -> Cell:
    """Its beginning, without the name of the algorithm."""
    return Cell(digest.rpartition(":")[2][:_HEX], digest or None)


def _labels(labels: object) -> str:
    if not isinstance(labels, list | tuple):
        return ""
    rest = f", … ({len(labels)})" if len(labels) > _LABELS else ""
    return ", ".join(map(str, labels[:_LABELS])) + rest


def _merge(manifest: Mapping[str, Any]) -> _Cells:
    method = manifest.get("method")
    name = _mapping(method).get("name") if isinstance(method, Mapping) else method
    parameters = _mapping(method).get("parameters", manifest.get("parameters"))
    inputs = "; ".join(filter(None, (_seen(manifest, "fit", "fitted"), _seen(manifest, "alignment", "aligned"))))
    digest = _digest(str(_mapping(manifest.get("encoder")).get("content") or ""))
    return Cell(str(name or "")), Cell(listed(parameters) or "–"), Cell(inputs or "no inputs"), digest


def _seen(manifest: Mapping[str, Any], section: str, verb: str) -> str:
    """The inputs that a fit or an alignment has used; empty if there was none."""
    facts = _mapping(manifest.get(section))
    if not facts:
        return ""
    counts = [_mapping(task).get("inputs") for task in _mapping(facts.get("tasks")).values()]
    numbers = [count for count in counts if isinstance(count, int)]
    least, most = min(numbers, default=0), max(numbers, default=0)
    many = f"{least}–{most}" if least != most else str(least) if numbers else ""
    words = [verb, f"by {facts['aligner']}" if facts.get("aligner") else "", "on"]
    words += [f"{many} inputs per task" if many else "inputs", f"from {facts['split']}" if facts.get("split") else ""]
    words.append(f"({facts['access']})" if facts.get("access") else "")
    return " ".join(filter(None, words))


def _recorded_merges(records: Sequence[Record]) -> tuple[_Cells, ...]:
    """Methods with their parameters; the digest only if all tasks share one model."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.method not in REFERENCES:
            groups.setdefault(record.method, []).append(record)
    merges = []
    for method, own in groups.items():
        digests = {record.inputs.get("model", "") for record in own}
        digest = digests.pop() if len(digests) == 1 else ""
        merges.append((Cell(method), Cell(listed(own[0].parameters) or "–"), _digest(digest)))
    return tuple(merges)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def size_of(count: float) -> str:
    """Bytes as a person writes them."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 1000:
            return f"{count:.0f} {unit}" if count >= 100 else f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"


def time_of(seconds: float) -> str:
    """Seconds as a person writes them."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def listed(values: object) -> str:
    """Options as `scale = 0.3, density = 0.2`."""
    if isinstance(values, Mapping):
        return ", ".join(f"{name} = {_option(value)}" for name, value in values.items() if value is not None)
    return "" if values is None else str(values)


def _option(value: object) -> str:
    if isinstance(value, Mapping):
        return f"({listed(value)})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def numbers_of(numbers: Mapping[str, float]) -> list[tuple[str, str]]:
    """Names and numbers; `x`, `x, low` and `x, high` are one: `1.5 (1.2 to 1.8)`."""
    rows = []
    for name, value in numbers.items():
        stem, _, end = name.rpartition(", ")
        if end in ("low", "high") and stem in numbers:
            continue
        low, high = numbers.get(f"{name}, low"), numbers.get(f"{name}, high")
        interval = "" if low is None or high is None else f" ({_short(low)} to {_short(high)})"
        rows.append((name, f"{_short(value)}{interval}"))
    return rows


def _short(value: float) -> str:
    """Three digits."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return "0" if value == 0 else f"{value:#.3g}".removesuffix(".")
