"""The source of the site in one folder: our pages with their links turned to where things are there, and what is made.

Pages are plain Markdown that reads well where the repository is looked at; what only the site can do (pages a method,
a tree of contents) is added here, on the way. A link that leads to nothing is an error.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from docs.generator.commands import cli_page
from docs.generator.docstrings import prose
from docs.generator.rows import pages, slug, tables
from docs.generator.types import recipe_page, table

ROOT = Path(__file__).parents[2]
# What the tree of contents shows, in order; pages that are not there are left out, others follow at the end.
_PARTS = {
    "Start": ("quickstart", "tutorial", "faq", "glossary"),
    "Guides": (
        "checkpoints",
        "recipes",
        "methods",
        "fitting",
        "alignment",
        "evaluation",
        "diagnosis",
        "report",
        "handover",
        "sweeps",
    ),
    "Evidence": ("guarantees", "findings", "gallery", "benchmarks/index"),
    "Reference": ("reference/recipe", "reference/cli"),
    "Project": ("changelog", "architecture", "contributing", "adr/index"),
}
# The pages under which a table's rows stand.
_HOMES = {"methods": "methods", "fitted": "fitting", "aligners": "alignment", "protocols": "evaluation"}
_LINK = re.compile(r"(!?\[(?:[^\[\]]|!?\[[^\]]*\](?:\([^)]*\))?)*\]\()([^)\s]+)(\))")
_COMMANDS = ("orthomerge ", "make", "pip ", "python ")


def places(root: Path = ROOT) -> dict[str, str]:
    """Pages of the repository to their places in the site."""
    found = {f"docs/{file.name}": file.name for file in sorted((root / "docs").glob("*.md"))}
    found |= {f"docs/adr/{file.name}": f"adr/{file.name}" for file in sorted((root / "docs" / "adr").glob("*.md"))}
    gallery = sorted((root / "docs" / "gallery").glob("*.md"))
    found |= {f"docs/gallery/{file.name}": f"gallery/{file.name}" for file in gallery}
    results = sorted((root / "benchmarks" / "results").glob("*.md"))
    found |= {f"benchmarks/results/{file.name}": f"benchmarks/{file.name}" for file in results}
    others = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
    return found | {source: target for source, target in others.items() if (root / source).is_file()}


def assemble(target: Path, root: Path = ROOT) -> list[str]:
    """Write the whole source into `target`; the pages that are there, in order."""
    if target.exists():
        shutil.rmtree(target)
    made = _generated(root)
    known = places(root)
    texts = {
        place: link_rows(label_fences(relink((root / source).read_text("utf-8"), source, known, root)), place)
        for source, place in known.items()
    }
    texts |= made
    for place, tree in contents(texts).items():
        texts[place] += tree
    for place, text in texts.items():
        (target / place).parent.mkdir(parents=True, exist_ok=True)
        (target / place).write_text(text, encoding="utf-8")
    shutil.copytree(root / "docs" / "images", target / "images")
    return sorted(texts)


def relink(text: str, source: str, known: Mapping[str, str], root: Path = ROOT) -> str:
    """Links of the page `source` as they are in the site; what is no page there stays as words."""
    here = known[source]

    def turned(match: re.Match[str]) -> str:
        before, link, after = match.groups()
        path, sign, anchor = link.partition("#")
        if not path or re.match(r"[a-z]+:", link):
            return match[0]
        there = os.path.normpath(os.path.join(os.path.dirname(source), path))  # noqa: PTH118, PTH120 - of two trees
        if not (root / there).exists():
            raise ValueError(f"{source} links to {link}, which is not there")
        if there in known:
            place = os.path.relpath(known[there], os.path.dirname(here) or ".")  # noqa: PTH120
            return f"{before}{place}{sign}{anchor}{after}"
        if there.startswith("docs/images/"):
            return match[0]
        words = before[1:-2]
        return words if there in words else f"{words} (`{there}`)"

    return _outside_code(text, lambda part: _LINK.sub(turned, part))


def label_fences(text: str) -> str:
    """Blocks of commands that say no language are shells'; everything else stays."""
    lines = text.splitlines(keepends=True)
    inside = False
    for number, line in enumerate(lines):
        if not line.lstrip(" ").startswith("```"):
            continue
        inside = not inside
        if inside and line.strip() == "```" and number + 1 < len(lines):
            kind = "bash" if lines[number + 1].lstrip().startswith(_COMMANDS) else "text"
            lines[number] = line.replace("```", f"```{kind}")
    return "".join(lines)


def link_rows(text: str, place: str) -> str:
    """Names of methods, aligners and protocols in the first column of a guide's tables lead to their pages."""
    kinds = [kind for kind, home in _HOMES.items() if f"{home}.md" == place]
    if place == "methods.md":
        kinds.append("fitted")
    links = {
        name: f"reference/{kind}/{slug(name)}.md" for kind in kinds for name in tables()[kind]
    }  # no name is in two of a page's tables

    def linked(match: re.Match[str]) -> str:
        cell = re.sub(
            r"`([\w@-]+)`", lambda one: f"[{one[0]}]({links[one[1]]})" if one[1] in links else one[0], match[1]
        )
        return f"| {cell} |"

    return re.sub(r"(?m)^\| ((?:`[\w@-]+`(?:, )?)+) \|", linked, text) if links else text


def contents(texts: Mapping[str, str]) -> dict[str, str]:
    """Trees to put under pages: all of them from the index, and each table's rows from its guide."""
    left = [place.removesuffix(".md") for place in texts]
    trees: dict[str, str] = {}
    for kind, home in _HOMES.items():
        names = [f"reference/{kind}/{slug(name)}" for name in tables()[kind]]
        trees[f"{home}.md"] = _tree(names)
        left = [name for name in left if name not in names]
    for folder in ("benchmarks", "adr"):
        names = sorted(name for name in left if name.startswith(f"{folder}/") and name != f"{folder}/index")
        trees[f"{folder}/index.md"] = _tree([name.removeprefix(f"{folder}/") for name in names])
        left = [name for name in left if name not in names]
    if suites := sorted(name for name in left if name.startswith("gallery/")):
        trees["gallery.md"] = _tree(suites)
        left = [name for name in left if name not in suites]
    whole = ""
    left.remove("index")
    for caption, wanted in _PARTS.items():
        there = [name for name in wanted if name in left]
        left = [name for name in left if name not in there]
        whole += _tree(there, caption)
    trees["index.md"] = whole + (_tree(left, "More") if left else "")
    return trees


def meanings(text: str) -> dict[str, str]:
    """What a guide's table `key | default | meaning` says of every key."""
    rows = re.findall(r"(?m)^\| `(\w+)` \|(?:[^|\n]*)\| (.*) \|$", text)
    return {
        key: re.sub(r"\]\((?=[\w-]+\.md)", "](../", meaning.replace("](#", "](recipes.md#")) for key, meaning in rows
    }


def _generated(root: Path) -> dict[str, str]:
    from orthomerge.cli.app import app
    from orthomerge.runs.recipe import Recipe

    guide = (root / "docs" / "recipes.md").read_text("utf-8")
    return {
        **pages(),
        "reference/recipe.md": recipe_page(Recipe, meanings(guide)),
        "reference/cli.md": cli_page(app),
        "benchmarks/index.md": _benchmarks(root),
        "adr/index.md": _decisions(root),
    }


def _benchmarks(root: Path) -> str:
    rows = []
    for file in sorted((root / "benchmarks" / "results").glob("*.md")):
        text = file.read_text("utf-8")
        command = re.search(r"(?m)^- command: (`.*`)$", text)
        date = re.search(r"(?m)^- date: (\S+)", text)
        script = re.search(r"python ([^\s`]+)", command[1]) if command else None
        rows.append((f"[{_title(text)}]({file.name})", f"`{script[1]}`" if script else "", date[1] if date else ""))
    said = (
        "Figures in these documents come from these tables, or from `make demo`. Each table names the command, "
        "the commit, the machine and the versions that made it; `make help` lists the targets."
    )
    return f"# Benchmarks\n\n{said}\n\n{table(('table', 'made by', 'on'), rows)}\n"


def _decisions(root: Path) -> str:
    files = sorted((root / "docs" / "adr").glob("*.md"))
    rows = [f"- [{prose(_title(file.read_text('utf-8')))}]({file.name})" for file in files]
    return "# Decisions\n\nWhy things are as they are, one page each.\n\n" + "\n".join(rows) + "\n"


def _title(text: str) -> str:
    found = re.search(r"(?m)^# (.+)$", text)
    return found[1] if found else "untitled"


def _tree(names: list[str], caption: str | None = None) -> str:
    head = f":caption: {caption}\n" if caption else ""
    return "\n```{toctree}\n:hidden:\n" + head + "\n" + "\n".join(names) + "\n```\n" if names else ""


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    pieces = re.split(r"(?ms)(^ *```.*?^ *```$)", text)
    return "".join(piece if number % 2 else change(piece) for number, piece in enumerate(pieces))
