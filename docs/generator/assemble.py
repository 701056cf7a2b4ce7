"""The source of the site in one folder: the pages of the repository with their links changed, and generated pages.

Pages are plain Markdown that reads well on GitHub, too; what only the site has (a page per method, the tree of
contents, the JSON Schema of recipes) is added here. A link to a file that does not exist is an error.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
from docs.generator.commands import cli_page
from docs.generator.options import guide_texts, recipe_page
from docs.generator.rows import pages

ROOT = Path(__file__).parents[2]
# The tree of contents, in order; pages that do not exist are left out, others follow at the end.
_PARTS = {
    "Start": "quickstart tutorial faq glossary",
    "Guides": "checkpoints recipes methods fitting alignment evaluation diagnosis report handover sweeps scaling",
    "Evidence": "guarantees findings gallery benchmarks/index",
    "Reference": "reference/recipe reference/cli",
    "Project": "changelog architecture contributing adr/index",
}
# The guides below which the pages of tables and folders stand.
_HOMES = {"methods": "methods", "fitted": "fitting", "aligners": "alignment", "protocols": "evaluation"}
_LINK = re.compile(r"(!?\[(?:[^\[\]]|!?\[[^\]]*\](?:\([^)]*\))?)*\]\()([^)\s]+)(\))")


def places(root: Path = ROOT) -> dict[str, str]:
    """Pages of the repository to their places in the site."""
    sources = {"docs": "", "docs/adr": "adr/", "docs/gallery": "gallery/", "benchmarks/results": "benchmarks/"}
    files = {
        f"{folder}/{path.name}": place + path.name
        for folder, place in sources.items()
        for path in sorted((root / folder).glob("*.md"))
    }
    return {**files, "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


def assemble(target: Path, root: Path = ROOT) -> list[str]:
    """Write the whole source into `target`; returns its pages in order."""
    shutil.rmtree(target, ignore_errors=True)
    known = places(root)
    texts = {}
    for source, place in known.items():
        texts[place] = relink((root / source).read_text("utf-8"), source, known, root)
    texts |= _generated(root)
    for place, tree in contents(list(texts)).items():
        texts[place] += tree
    for place, text in texts.items():
        (target / place).parent.mkdir(parents=True, exist_ok=True)
        (target / place).write_text(text, encoding="utf-8")
    shutil.copytree(root / "docs" / "images", target / "images")
    return sorted(texts)


def recipe_schema() -> bytes:
    """The JSON Schema of recipes, for editors; as in the reader, a key that no type has is an error."""
    from orthomerge.runs.recipe import Recipe

    document = msgspec.json.schema(Recipe)
    for part in document["$defs"].values():
        if "properties" in part:
            part["additionalProperties"] = False
    return msgspec.json.format(msgspec.json.encode(document), indent=1)


def relink(text: str, source: str, known: Mapping[str, str], root: Path = ROOT) -> str:
    """Change the links of the page `source` to those of the site; other files of the repository become text."""
    here, folder = os.path.dirname(known[source]) or ".", os.path.dirname(source)  # noqa: PTH120 - relative paths

    def changed(match: re.Match[str]) -> str:
        before, link, after = match.groups()
        path, sign, anchor = link.partition("#")
        if not path or re.match(r"[a-z]+:", link):
            return match[0]
        target = os.path.normpath(os.path.join(folder, path))  # noqa: PTH118 - of two trees
        if not (root / target).exists():
            raise ValueError(f"{source} links to {link}, which does not exist")
        if target in known:
            return f"{before}{os.path.relpath(known[target], here)}{sign}{anchor}{after}"
        if target.startswith("docs/images/"):
            return match[0]
        words = before[1:-2]
        return words if target in words else f"{words} (`{target}`)"

    pieces = re.split(r"(?ms)(^ *```.*?^ *```$)", text)
    return "".join(piece if number % 2 else _LINK.sub(changed, piece) for number, piece in enumerate(pieces))


def contents(texts: list[str]) -> dict[str, str]:
    """Trees to append to pages: parts of the site to the index, and rows, results and decisions to their guides."""
    names = [place.removesuffix(".md") for place in texts if place != "index.md"]
    homes = {f"reference/{kind}/": home for kind, home in _HOMES.items()}
    homes |= {"benchmarks/": "benchmarks/index", "adr/": "adr/index", "gallery/": "gallery"}
    trees = {}
    for folder, home in homes.items():
        below = sorted(name for name in names if name.startswith(folder) and name != home)
        trees[f"{home}.md"] = _tree([f"/{name}" for name in below], ":maxdepth: 1\n")
        names = [name for name in names if name not in below]
    listed = " ".join(_PARTS.values()).split()
    parts = {**_PARTS, "More": " ".join(name for name in names if name not in listed)}
    captioned = [
        _tree([name for name in part.split() if name in names], f":hidden:\n:caption: {caption}\n")
        for caption, part in parts.items()
    ]
    return {**trees, "index.md": "".join(captioned)}


def _tree(names: list[str], options: str) -> str:
    return "\n```{toctree}\n" + options + "\n" + "\n".join(names) + "\n```\n" if names else ""


def _generated(root: Path) -> dict[str, str]:
    from orthomerge.cli.app import app
    from orthomerge.runs.recipe import Recipe

    guide = guide_texts((root / "docs" / "recipes.md").read_text("utf-8"), "../recipes.md")
    return {
        **pages(),
        "reference/recipe.md": recipe_page(Recipe, guide),
        "reference/cli.md": cli_page(app),
        "benchmarks/index.md": "# Benchmarks\n\nEach table names the command and the commit that it was made with.\n",
        "adr/index.md": "# Decisions\n\nWhy things are as they are, one page per decision.\n",
    }
