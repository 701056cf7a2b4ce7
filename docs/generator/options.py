"""Docstrings as Markdown, and tables of options: the fields of a dataclass are the reference of a recipe."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml

from orthomerge.core.schema import describe, schema

MEANINGS: Mapping[str, str] = yaml.safe_load((Path(__file__).parent / "meanings.yaml").read_text("utf-8"))
_NAMES = r"`\w+`(?:(?:, | and |, and )`\w+`)*"
_ARXIV = re.compile(r"arXiv\s(\d{4}\.\d{4,5})(?: (v\d+))?")


def markdown(text: str | None) -> list[str]:
    """Paragraphs of a docstring. Indented blocks become code; *Letters:* and *Differs from ...:* start a paragraph."""
    paragraphs: list[str] = []
    for block in filter(None, re.split(r"\n[ \t]*\n", inspect.cleandoc(text or ""))):
        if all(line.startswith("    ") for line in block.splitlines()):
            paragraphs.append(f"```text\n{inspect.cleandoc(block)}\n```")
        else:
            marked = re.sub(
                r"(?:^|(?<=\n)|(?<=\. ))\*?(Letters|Differs from [^:\n]{1,40}):\*?\s", r"\n\n**\1:** ", block
            )
            paragraphs += [prose(part) for part in marked.split("\n\n")]
    return [paragraph for paragraph in paragraphs if paragraph]


def prose(text: str) -> str:
    """Running text as Markdown: no HTML by accident, arXiv numbers as links."""
    pieces = re.split(r"(`[^`\n]*`)", text.strip())
    return "".join(piece if piece.startswith("`") else _linked(piece.replace("<", "&lt;")) for piece in pieces)


def _linked(text: str) -> str:
    return _ARXIV.sub(lambda match: f"[{match[0]}](https://arxiv.org/abs/{match[1]}{match[2] or ''})", text)


def documentation_of(maker: Callable[..., object]) -> str:
    """Docstring that may describe options: the whole of a class, one paragraph of a function."""
    if isinstance(maker, type):
        return maker.__doc__ or ""
    return "\n\n".join(block for block in (inspect.getdoc(maker) or "").split("\n\n") if block.startswith("`"))


def option_texts(text: str | None, names: Collection[str]) -> tuple[str, dict[str, str]]:
    """Split a docstring into its lead and a text per field: `` `density`: share that stays; `scale`: ``"""
    whole = " ".join(inspect.cleandoc(text or "").split())
    matches = re.finditer(rf"(?:^|(?<=[.;] ))({_NAMES})(?=[: ])", whole)
    starts = [match for match in matches if set(_quoted(match[1])) <= set(names)]
    ends = [*(match.start() for match in starts[1:]), len(whole)]
    lead = whole[: starts[0].start()].strip() if starts else whole
    texts: dict[str, str] = {}
    for match, end in zip(starts, ends, strict=False):
        clause = whole[match.end() : end].strip()
        fields = _quoted(match[1])
        if len(fields) > 1 and not clause.startswith(":"):  # a sentence about several fields, not a list of them
            lead = f"{lead} {match[0]} {clause}".strip()
            continue
        for field in fields:
            texts.setdefault(field, prose(clause.rstrip(";.").removeprefix(":")))
    return "" if lead.startswith("See the module") else prose(lead), texts


def _quoted(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; a cell stays on its line."""
    lines = [columns, ["---" for _ in columns], *rows]
    escaped = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def guide_texts(guide: str) -> dict[str, str]:
    """Meanings in the tables `option | default | meaning` of a guide, without links."""
    texts: dict[str, str] = {}
    for names, meaning in re.findall(r"(?m)^\| ((?:`\w+`(?:, )?)+) \|[^|\n]*\| (.*) \|$", guide):
        texts |= dict.fromkeys(re.findall(r"`(\w+)`", names), re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", meaning))
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
    """Table of a dataclass's or function's options: name, meaning, type, default; empty if it has none."""
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
