"""Docstrings as Markdown, and what the docstring of a class says of each of its fields."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection

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
    """What may describe options: the whole docstring of a class, one paragraph of a function's."""
    if isinstance(maker, type):
        return maker.__doc__ or ""
    return "\n\n".join(block for block in (inspect.getdoc(maker) or "").split("\n\n") if block.startswith("`"))


def option_texts(text: str | None, names: Collection[str]) -> tuple[str, dict[str, str]]:
    """What a docstring says before it comes to its fields, and of each: `` `density`: share that stays; `scale`: ``"""
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
