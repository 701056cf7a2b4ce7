"""Our Markdown pages as tests see them: blocks of code, links, anchors."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "adr").glob("*.md")),
    *sorted((ROOT / "docs" / "gallery").glob("*.md")),
    *sorted((ROOT / "benchmarks" / "results").glob("*.md")),
]
_FENCE = re.compile(r"(?ms)^( *)```(\w*)\n(.*?)^ *```$")
_SHELLS = {"", "bash", "console", "sh", "shell"}


def blocks(path: Path) -> list[tuple[str, str]]:
    """Language and text of every block of code, in order."""
    found = _FENCE.findall(path.read_text("utf-8"))
    return [(kind, textwrap.dedent(text)) for _, kind, text in found]


def commands(path: Path) -> list[list[str]]:
    """The words of every line in a shell's block, continued lines joined and comments left out."""
    lines = [
        line
        for kind, text in blocks(path)
        if kind in _SHELLS
        for line in text.replace("\\\n", " ").splitlines()
        if line.startswith(("orthomerge ", "make ", "$ orthomerge "))
    ]
    return [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]


def inline(path: Path) -> list[str]:
    """Code within running text."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", _FENCE.sub("", path.read_text("utf-8")))


def links(path: Path) -> list[str]:
    """The targets of all links and pictures, code left out."""
    text = re.sub(r"(?<!`)`[^`\n]*`(?!`)", "", _FENCE.sub("", path.read_text("utf-8")))
    return re.findall(r"\]\(([^)\s]+)\)", text)


def anchors(path: Path) -> set[str]:
    """What headings are called as targets, as GitHub and MyST do it."""
    names = re.findall(r"(?m)^#+ (.+)$", _FENCE.sub("", path.read_text("utf-8")))
    return {re.sub(r"[^\w\- ]", "", name.replace("`", "").strip().lower()).replace(" ", "-") for name in names}
