"""Docstrings of this project taken apart: summary, body, letters, differences, and what is said of each option.

A module starts with one sentence, then the reference and the formula, then *Letters:* and *Differs from ...:* where
there are any. A class says of its fields: `` `density`: share of entries that stay; `scale`: lambda. `` Whatever is
missing is empty here, never an error.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

_MARK = re.compile(r"(?:^|(?<=\n)|(?<=\. ))\*?(Letters|Differs from [^:\n]{1,40}):\*?\s+")
_NAMES = r"`\w+`(?:(?:, | and |, and )`\w+`)*"
_WIDE = 88  # what fits beside the contents without scrolling
_ARXIV = re.compile(r"arXiv (\d{4}\.\d{4,5})(?: (v\d+))?")


@dataclass(frozen=True)
class Doc:
    """A module's docstring. `body` and the texts of `differs` (from whom, what) are blocks of Markdown."""

    summary: str = ""
    body: tuple[str, ...] = ()
    letters: str = ""
    differs: tuple[tuple[str, str], ...] = ()


def parse(text: str | None) -> Doc:
    """A module's docstring in its parts."""
    blocks = [block for block in re.split(r"\n[ \t]*\n", (text or "").rstrip()) if block.strip()]
    if not blocks:
        return Doc()
    body: list[str] = []
    letters = ""
    differs: list[tuple[str, str]] = []
    for block in blocks[1:]:
        if all(line.startswith("    ") for line in block.splitlines()):
            body.append(f"```text\n{_dedented(block)}\n```")
            continue
        pieces = _MARK.split(block)
        if pieces[0].strip():
            body.append(prose(pieces[0]))
        for mark, said in zip(pieces[1::2], pieces[2::2], strict=True):
            if mark == "Letters":
                letters, _, rest = said.partition(".\n")
                letters = prose(letters.rstrip("."))
                body.extend([prose(rest)] if rest.strip() else [])
            else:
                differs.append((mark.removeprefix("Differs from "), prose(said)))
    return Doc(prose(_joined(blocks[0])), tuple(_fences_joined(body)), letters, tuple(differs))


def about_options(maker: Callable[..., object]) -> str:
    """What says something of the options: all of a class's docstring, one paragraph of a function's."""
    if isinstance(maker, type):
        return maker.__doc__ or ""
    return "\n\n".join(block for block in (inspect.getdoc(maker) or "").split("\n\n") if block.startswith("`"))


def option_texts(text: str | None, names: Collection[str]) -> tuple[str, dict[str, str]]:
    """What a class's docstring says before it comes to its fields, and what it says of each."""
    whole = " ".join(inspect.cleandoc(text or "").split())
    starts = re.compile(rf"(?:^|(?<=[.;] ))({_NAMES})(?=[: ])")
    found = [match for match in starts.finditer(whole) if set(_quoted(match[1])) <= set(names)]
    said: dict[str, str] = {}
    lead = whole[: found[0].start()].strip() if found else whole
    lead = "" if lead.startswith("See the module") else lead
    for number, match in enumerate(found):
        end = found[number + 1].start() if number + 1 < len(found) else len(whole)
        clause = whole[match.end() : end].strip()
        if not clause.startswith(":") and len(_quoted(match[1])) > 1:  # a sentence about several, not a list of them
            lead = f"{lead} {match[0]} {clause}".strip()
            continue
        for name in _quoted(match[1]):
            said.setdefault(name, prose(clause.rstrip(";.").removeprefix(":")))
    return prose(lead), said


def prose(text: str) -> str:
    """Plain words of a docstring as Markdown: no HTML by accident, arXiv numbers as links."""
    pieces = re.split(r"(`[^`\n]*`)", text.strip())
    return "".join(piece if piece.startswith("`") else _linked(piece.replace("<", "&lt;")) for piece in pieces)


def _linked(text: str) -> str:
    def link(match: re.Match[str]) -> str:
        number, version = match.groups()
        return f"[{match[0]}](https://arxiv.org/abs/{number}{version or ''})"

    return _ARXIV.sub(link, re.sub(r"arXiv\n(?=\d)", "arXiv ", text))


def _quoted(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text)


def _joined(block: str) -> str:
    return " ".join(block.split())


def _dedented(block: str) -> str:
    """Formulas without their indent; of long lines, those that stand side by side one below the other."""
    lines = []
    for line in inspect.cleandoc("\n" + block).splitlines():
        indent = " " * (len(line) - len(line.lstrip()))
        sides = re.split(r" {3,}", line.strip()) if len(line) > _WIDE else [line.strip()]
        lines += [indent + side for side in sides]
    return "\n".join(lines)


def _fences_joined(blocks: list[str]) -> list[str]:
    """Formulas that only a blank line parts are one block."""
    done: list[str] = []
    for block in blocks:
        if block.startswith("```text") and done and done[-1].startswith("```text"):
            done[-1] = done[-1].removesuffix("\n```") + "\n\n" + block.removeprefix("```text\n")
        else:
            done.append(block)
    return done
