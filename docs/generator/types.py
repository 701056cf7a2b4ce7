"""Types as tables: the fields of a dataclass are the schema of what a recipe may say, so they are its reference too."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_args, get_origin

import yaml
from docs.generator.docstrings import about_options, option_texts

from orthomerge.core.schema import describe, schema

# What every method means by these; said here once where a class does not say more.
COMMON = {
    "seed": "of all that is drawn; the recipe's `seed` unless given",
    "steps": "how many steps are trained",
    "lr": "learning rate",
    "batch": "inputs a step, of every task",
    "hold_out": "share of the inputs that is not trained on",
    "look": "steps between two looks at the held-out loss",
    "checkpointing": "compute activations again in the backward pass, to save memory",
    "options": "of what is named beside it",
    "weights": "one number an expert",
    "normalize": "divide by the sum of the weights",
    "rescale": "enlarge what is left",
}
# What the keys of a recipe's blocks mean, where their classes do not say it.
_KEYS = {
    "evaluate": "score the merge; for `orthomerge run`",
    "diagnose": "say what was lost and why; for `orthomerge run`",
    "report": "make a page of it; for `orthomerge run`",
    "sweep": "try many merges; for `orthomerge sweep`",
    "path": "folder, file, adapter or hub id",
    "prefix": "before the encoder's names, only if it cannot be told from names and shapes",
    "labels": "names of the classes in the head's order, only if `config.json` does not say",
    "head": "only if the head is not where its family keeps it",
    "activation": "between the two layers of a head",
    "aligner": "a row of the [table of aligners](../alignment.md#aligners)",
    "options": "of the aligner",
    "split": "which split of the data is looked at",
    "device": "what computes: `auto`, `cpu`, `cuda`, ...",
    "batch": "inputs encoded at once",
    "points": "inputs a task for t-SNE; 0 for none",
    "layers": "inputs a task for CKA; 0 for none",
    "maps": "inputs a task that maps are fitted to, at most",
    "probe": "fit a linear probe, with labels, as a ceiling",
    "limit": "at most so many train inputs a task, for all that is fitted",
}


def table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table; what is in a cell stays in it."""
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join(
        "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def plain(value: Any) -> Any:
    """A default as a recipe would write it: of a dataclass, the fields that differ from their own defaults."""
    if is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: getattr(value, field.name) for field in fields(value)}
        told = {name: plain(one) for name, one in changed.items() if one != _of_field(type(value), name)}
        first = next(iter(changed))
        return told or {first: plain(changed[first])}
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    return value


def default(field: Field[Any]) -> str:
    """What holds when an option is left out, as a cell."""
    value = _value(field)
    if value is MISSING:
        return "*required*"
    return "*none*" if value is None else f"`{_written(plain(value))}`"


def options_table(
    maker: Callable[..., Any],
    told: Mapping[str, str] | None = None,
    *,
    common: Mapping[str, str] = COMMON,
    links: Mapping[type, str] | None = None,
) -> str:
    """Every option of a dataclass or function: name, meaning, type, default.

    `told` knows better than the docstring; `common` fills in where both are silent.
    """
    known = schema(maker)
    if not known:
        return ""
    _, said = option_texts(about_options(maker), known)
    rows = []
    for name, (kind, field) in known.items():
        meaning = (told or {}).get(name) or said.get(name) or common.get(name, "")
        rows.append((f"`{name}`", meaning, _linked_kind(kind, links or {}), default(field)))
    return table(("option", "meaning", "type", "default"), rows)


def blocks(cls: type, path: str = "") -> Iterator[tuple[str, type]]:
    """A dataclass and all that its fields hold, each with the place in a recipe where it stands."""
    yield path, cls
    for name, (kind, _) in schema(cls).items():
        for inner, where in _inside(kind):
            yield from blocks(inner, f"{path}.{name}{where}".removeprefix("."))


def recipe_page(cls: type, meanings: Mapping[str, str]) -> str:
    """The recipe reference. `meanings`: what our guide says of the keys, by name."""
    found: dict[type, str] = {}
    for path, part in blocks(cls):
        found.setdefault(part, path)
    links = {part: f"`{path}`](#{_anchor(path)})" for part, path in found.items() if path}
    out = [
        "# Recipe reference",
        "Every key that a recipe may have, made from the types that read it: what is not here is an error.",
        "How to write one, with examples: [recipes](../recipes.md).",
    ]
    for part, path in found.items():
        lead, _ = option_texts(part.__doc__, schema(part))
        out += [f"({_anchor(path)})=", f"## `{path}`" if path else "## The file", lead]
        out.append(options_table(part, meanings if not path else None, common=_KEYS, links=links))
    text = "\n\n".join(filter(None, out)) + "\n"
    return re.sub(r"`docs/(\w+)\.md`", r"[\1](../\1.md)", text)


def _anchor(path: str) -> str:
    return "recipe-" + (
        "file" if not path else "".join(sign if sign.isalnum() else "-" for sign in path).strip("-").lower()
    )


def _inside(kind: Any) -> Iterator[tuple[type, str]]:
    if is_dataclass(kind) and isinstance(kind, type):
        yield kind, ""
        return
    origin = get_origin(kind)
    where = (
        "[]" if origin in (tuple, list) else ".NAME" if isinstance(origin, type) and issubclass(origin, Mapping) else ""
    )
    for part in get_args(kind):
        for inner, more in _inside(part):
            yield inner, where + more


def _linked_kind(kind: Any, links: Mapping[type, str]) -> str:
    inner = [links[part] for part, _ in _inside(kind) if part in links]
    text = describe(kind).replace(" or nothing", "")
    return text + "".join(f", see [{link}" for link in inner)


def _of_field(cls: type, name: str) -> Any:
    return _value(next(field for field in fields(cls) if field.name == name))


def _value(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _written(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).strip()
    return text.removesuffix("...").strip()
