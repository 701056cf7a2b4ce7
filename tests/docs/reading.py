"""The Markdown pages as tests read them: blocks of code, and the commands that they name."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

from docs.generator.commands import command_tree

from orthomerge.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs").glob("[!r]*/*.md")),  # docs/reference is generated
    *sorted((ROOT / "benchmarks" / "results").glob("*.md")),
]
_FENCE = re.compile(r"(?ms)^( *)```(\w*)\n(.*?)^ *```$")
_SHELLS = {"", "bash", "console", "sh", "shell"}


def blocks(path: Path) -> list[tuple[str, str]]:
    """Language and text of every block of code, in order."""
    return [(kind, textwrap.dedent(text)) for _, kind, text in _FENCE.findall(path.read_text("utf-8"))]


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


def find_command(words: list[str]) -> tuple[Any, list[str]]:
    """The command that a line means, and its other words; KeyError if there is none."""
    for path, command in command_tree(app):
        if tuple(words[: len(path)]) == path:
            return command, words[len(path) :]
    raise KeyError(" ".join(words[:2]))


def check_call(words: list[str]) -> None:
    """Fail unless the command line accepts these words after `orthomerge`."""
    command, rest = find_command(words)
    command.make_context("orthomerge", list(rest))
