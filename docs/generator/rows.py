"""A page for every row of a table: methods, fitted methods, aligners, protocols."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from docs.generator.options import (
    default_of,
    documentation_of,
    guide_texts,
    markdown,
    option_texts,
    options_table,
    prose,
)

from orthomerge.alignment.aligners import ALIGNERS
from orthomerge.core.schema import maker_of, schema
from orthomerge.evaluation.protocols import PROTOCOLS
from orthomerge.merging.methods import FITTED, METHODS

Row = Any  # of any table: name, maker, title, reference, and fields of its own
TABLES: Mapping[str, Mapping[str, Row]] = {
    "methods": METHODS,
    "fitted": FITTED,
    "aligners": ALIGNERS,
    "protocols": PROTOCOLS,
}
_GUIDE = Path(__file__).parents[1] / "fitting.md"
_EXPERTS = "./sst2 ./topic"
_INPUTS = "--data sst2=sst2.csv --data topic=topic.csv"


def page_of(kind: str, row: Row) -> str:
    """Path of a row's page below docs/reference."""
    return f"{kind}/{row.name.replace('@', '-at-')}.md"


def pages() -> dict[str, str]:
    """Path to text of all pages."""
    return {page_of(kind, row): page(kind, row) for kind, rows in TABLES.items() for row in rows.values()}


def page(kind: str, row: Row) -> str:
    """One row as Markdown: what its module says, options, and how to use it."""
    maker = maker_of(row)
    is_class = isinstance(maker, type)
    text = sys.modules[maker.__module__].__doc__ if is_class else maker.__doc__
    summary, *body = markdown(text) or [row.title]
    facts = [f"- **{name}:** {text}" for name, text in _facts(kind, row, maker)]
    lead, _ = option_texts(documentation_of(maker), schema(maker))
    options = options_table(maker, row.name, _guided(row.name))
    blocks = [f"# {row.name}", summary, "\n".join(facts)]
    blocks += [block for block in body if is_class or not block.startswith("`")]
    blocks += ["## Options", lead, options or ("" if lead else "It has none."), _command(kind, row, maker)]
    return "\n\n".join(filter(None, blocks)) + "\n"


def _guided(name: str) -> dict[str, str]:
    """Meanings of a method's options in the guide to fitted merges."""
    section = re.search(rf"(?ims)^## {re.escape(name)}$(.*?)(?=^## |\Z)", _GUIDE.read_text("utf-8"))
    return guide_texts(section[1].partition("| option |")[2]) if section else {}


def _facts(kind: str, row: Row, maker: Callable[..., Any]) -> list[tuple[str, str]]:
    facts = [("reference", "ours" if row.reference in ("orthomerge", "this project") else prose(row.reference))]
    if kind in ("methods", "fitted"):
        fewest, most = row.experts
        count = f"exactly {fewest} experts" if fewest == most else f"at least {fewest}" if fewest > 1 else "experts"
        facts.append(("needs", f"{count} and {'their base' if row.base else 'no base'}"))
    elif kind == "aligners":
        facts.append(("adds", "parameters of its own, counted" if row.extra else "nothing: the head keeps its size"))
    else:
        facts.append(("evidence", ", ".join(sorted(row.needs)) or "nothing but the test inputs"))
    return [*facts, ("source", f"`{row.maker.partition(':')[0].replace('.', '/')}.py`")]


def _command(kind: str, row: Row, maker: Callable[..., Any]) -> str:
    """A command that uses the row."""
    defaults = ((name, default_of(field)) for name, (_, field) in schema(maker).items() if name != "seed")
    setting = next((f" --set {name}={text.strip('`')}" for name, text in defaults if re.match(r"`[^\[{]", text)), "")
    lines = {
        "methods": [f"merge {_EXPERTS} --base ./base", f"--method {row.name}{setting} --out merged"],
        "fitted": [f"merge {_EXPERTS} --base ./base", _INPUTS, f"--method {row.name}{setting} --out merged"],
        "aligners": ["align merged", _INPUTS, f"--aligner {row.name}{setting} --out aligned"],
        "protocols": ["evaluate merged", _INPUTS, f"--protocol {row.name} --out run"],
    }
    return "```bash\northomerge " + " \\\n    ".join(lines[kind]) + "\n```"
