"""Parts of the site beyond the Markdown pages of the repository: generated pages, trees of contents, a JSON Schema."""

from __future__ import annotations

from pathlib import Path

import msgspec
from docs.generator.commands import cli_page
from docs.generator.options import guide_texts, recipe_page
from docs.generator.rows import pages

from orthomerge.cli.app import app
from orthomerge.runs.recipe import Recipe

ROOT = Path(__file__).parents[2]
# Captions of the sidebar, with their pages in order.
_PARTS = {
    "Start": "quickstart tutorial faq glossary",
    "Guides": "checkpoints recipes methods fitting alignment evaluation diagnosis report handover sweeps scaling",
    "Evidence": "guarantees findings gallery reference/benchmarks",
    "Reference": "reference/recipe reference/cli",
    "Project": "/CHANGELOG architecture /CONTRIBUTING reference/decisions",
}


def _tree(*names: str, options: str = ":maxdepth: 1") -> str:
    return "\n```{toctree}\n:glob:\n" + options + "\n\n" + "\n".join(names) + "\n```\n"


# What is appended to pages of the repository: parts of the site to the index, and pages of rows to their guides.
TREES = {
    "docs/index": "".join(
        _tree(*names.split(), options=f":hidden:\n:caption: {caption}") for caption, names in _PARTS.items()
    ),
    "docs/methods": _tree("reference/methods/*"),
    "docs/fitting": _tree("reference/fitted/*"),
    "docs/alignment": _tree("reference/aligners/*"),
    "docs/evaluation": _tree("reference/protocols/*"),
    "docs/gallery": _tree("gallery/*"),
}


def write_pages(folder: Path = ROOT / "docs" / "reference") -> None:
    """Write all generated pages; those that are there already stay untouched, so that Sphinx skips them."""
    guide = guide_texts((ROOT / "docs" / "recipes.md").read_text("utf-8"))
    texts = {
        **pages(),
        "recipe.md": recipe_page(Recipe, guide),
        "cli.md": cli_page(app),
        "benchmarks.md": "# Benchmarks\n\nEach table names the command and the commit that it was made with.\n"
        + _tree("/benchmarks/results/*"),
        "decisions.md": "# Decisions\n\nWhy things are as they are, one page per decision.\n" + _tree("/docs/adr/*"),
    }
    for old in set(folder.rglob("*.md")) - {folder / name for name in texts}:
        old.unlink()
    for name, text in texts.items():
        path = folder / name
        if not path.exists() or path.read_text("utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def recipe_schema() -> bytes:
    """The JSON Schema of recipes, for editors; as in the reader, a key that no type has is an error."""
    document = msgspec.json.schema(Recipe)
    for part in document["$defs"].values():
        if "properties" in part:
            part["additionalProperties"] = False
    return msgspec.json.format(msgspec.json.encode(document), indent=1)
