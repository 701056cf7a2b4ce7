"""Options as tables: the fields of a dataclass are the schema of what a recipe may say, and so their reference."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from docs.generator.docstrings import documentation_of, option_texts

from orthomerge.core.schema import describe, schema

MEANINGS: Mapping[str, str] = yaml.safe_load((Path(__file__).parent / "meanings.yaml").read_text("utf-8"))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; a cell stays on its line."""
    lines = [columns, ["---" for _ in columns], *rows]
    escaped = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def guide_texts(guide: str, place: str) -> dict[str, str]:
    """What the tables `option | default | meaning` of a guide say; `place`: where the guide is, as seen from a page."""
    texts: dict[str, str] = {}
    for names, meaning in re.findall(r"(?m)^\| ((?:`\w+`(?:, )?)+) \|[^|\n]*\| (.*) \|$", guide):
        others = re.sub(r"\]\((?=[\w-]+\.md)", f"]({place.rpartition('/')[0]}/", meaning)
        linked = others.replace("](#", f"]({place}#")
        texts |= dict.fromkeys(re.findall(r"`(\w+)`", names), linked)
    return texts


def default_of(field: Field[Any]) -> str:
    """The value of an option that is left out, as a recipe would write it."""
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    if value is MISSING:
        return "*required*"
    if value is None or is_dataclass(value) or (isinstance(value, tuple) and any(map(is_dataclass, value))):
        return "*as described*" if value else "*none*"
    written = list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
    text = yaml.safe_dump(written, default_flow_style=True, width=10_000)
    return f"`{text.strip().removesuffix('...').strip()}`"


def options_table(maker: Callable[..., Any], name: str, guide: Mapping[str, str]) -> str:
    """Every option of a dataclass or function: name, meaning, type, default; empty if it has none."""
    options = schema(maker)
    _, texts = option_texts(documentation_of(maker), options)
    rows = []
    for option, (kind, field) in options.items():
        general = MEANINGS.get(option, "")
        meaning = guide.get(option) or texts.get(option) or MEANINGS.get(f"{name}.{option}", general)
        rows.append((f"`{option}`", meaning, describe(kind).replace(" or nothing", ""), default_of(field)))
    return table(("option", "meaning", "type", "default"), rows) if rows else ""


def recipe_page(cls: type, guide: Mapping[str, str]) -> str:
    """The recipe reference; `guide`: what the guide says of the keys of the file."""
    blocks = [
        "# Recipe reference",
        "Every key that a recipe may have, from the types that read it. [Recipes](../recipes.md) has examples.",
    ]
    places: dict[type, str] = {}
    for path, part in sections(cls):
        places.setdefault(part, path)
    for part, path in places.items():
        lead, _ = option_texts(part.__doc__, schema(part))
        blocks += [f"## `{path}`" if path else "## The file", lead, options_table(part, path, {} if path else guide)]
    return "\n\n".join(filter(None, blocks)) + "\n"


def sections(kind: Any, path: str = "") -> Iterator[tuple[str, type]]:
    """Dataclasses inside a type, each with its place in a recipe."""
    origin = get_origin(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        yield path, kind
        for name, (inner, _) in schema(kind).items():
            yield from sections(inner, f"{path}.{name}".removeprefix("."))
    elif origin is not None:
        mapping = isinstance(origin, type) and issubclass(origin, Mapping)
        suffix = ".NAME" if mapping else "[]" if origin in (tuple, list) else ""
        for part in get_args(kind):
            yield from sections(part, path + suffix)
