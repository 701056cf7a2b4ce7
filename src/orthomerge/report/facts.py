"""What was merged, from manifests; and numbers as people write them.

Manifests may have been written by anybody: every part of them may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orthomerge.core.table import Cell, Column, Table

_HEX = 12  # digits of a hash
_LABELS = 4
_PARTS = (Column("part"), Column("name"), Column("labels"), Column("size", "right"), Column("hash"))
_MERGES = (Column("method"), Column("options", wrap=True), Column("has seen"), Column("hash"))

_Cells = tuple[Cell, ...]


def merged_tables(manifests: Sequence[Mapping[str, Any]]) -> list[Table]:
    """For each set of parts: the files that went in, and the merges of them."""
    groups: dict[tuple[str, tuple[_Cells, ...]], dict[_Cells, None]] = {}
    for manifest in manifests:
        key = (str(manifest.get("family") or ""), tuple(_parts(manifest)))
        groups.setdefault(key, {})[_merge(manifest)] = None
    tables = []
    for (family, parts), merges in groups.items():
        if parts:
            tables.append(Table(f"Parts (family {family})" if family else "Parts", _PARTS, parts))
        tables.append(Table("Merges", _MERGES, tuple(merges)))
    return tables


def _parts(manifest: Mapping[str, Any]) -> list[_Cells]:
    inputs, heads = _mapping(manifest, "inputs"), _mapping(manifest, "heads")
    base = _mapping(inputs, "base")
    rows = [_part("base", base, ())] if base else []
    for task, expert in _mapping(inputs, "experts").items():
        rows += [_part(f"expert {task}", _mapping(expert), _mapping(heads, task).get("labels"))]
    return rows


def _part(role: str, entry: Mapping[str, Any], labels: object) -> _Cells:
    files = entry.get("files")
    files = [file for file in files if isinstance(file, Mapping)] if isinstance(files, list | tuple) else []
    total = sum(size for file in files if isinstance(size := file.get("size"), int))
    digest = str((files[0].get("hash") if files else None) or entry.get("hash") or "")
    revision = f" @ {entry['revision']}" if entry.get("revision") else ""
    names = [str(label) for label in labels] if isinstance(labels, list | tuple) else []
    shown = ", ".join(names[:_LABELS]) + (f", … ({len(names)})" if len(names) > _LABELS else "")
    return (
        Cell(role),
        Cell(f"{entry.get('name') or ''}{revision}"),
        Cell(shown),
        Cell(size_of(total) if total > 0 else ""),
        Cell(f"{len(files)} files") if len(files) > 1 else _digest(digest),
    )


def _merge(manifest: Mapping[str, Any]) -> _Cells:
    method = manifest.get("method")
    name = method.get("name") if isinstance(method, Mapping) else method
    parameters = _mapping(manifest, "method").get("parameters", manifest.get("parameters"))
    inputs = "; ".join(filter(None, (_seen(manifest, "fit", "fitted"), _seen(manifest, "alignment", "aligned"))))
    digest = _digest(str(_mapping(manifest, "encoder").get("content") or ""))
    return Cell(str(name or "")), Cell(listed(parameters) or "–"), Cell(inputs or "no inputs"), digest


def _seen(manifest: Mapping[str, Any], section: str, verb: str) -> str:
    """The inputs that a fit or an alignment has used; empty if there was none."""
    facts = _mapping(manifest, section)
    if not facts:
        return ""
    counts = [_mapping(facts, "tasks", task).get("inputs") for task in _mapping(facts, "tasks")]
    numbers = sorted({count for count in counts if isinstance(count, int)})
    words = [verb, f"by {facts['aligner']}" if facts.get("aligner") else "", "on"]
    words.append(f"{'–'.join(map(str, {numbers[0]: 0, numbers[-1]: 0}))} inputs per task" if numbers else "inputs")
    words += [
        f"from {facts['split']}" if facts.get("split") else "",
        f"({facts['access']})" if facts.get("access") else "",
    ]
    return " ".join(filter(None, words))


def _digest(digest: str) -> Cell:
    """Its beginning, without the name of the algorithm."""
    return Cell(digest.rpartition(":")[2][:_HEX], digest or None)


def _mapping(value: object, *keys: str) -> Mapping[str, Any]:
    """The mapping at a path of keys; empty if there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
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
