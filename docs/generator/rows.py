"""A page for every row of a table: methods, aligners, protocols."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from docs.generator.docstrings import Doc, about_options, option_texts, parse, prose
from docs.generator.types import COMMON, options_table, plain

from orthomerge.alignment.aligners import ALIGNERS
from orthomerge.core.rows import maker_of
from orthomerge.core.schema import schema
from orthomerge.evaluation.protocols import PROTOCOLS
from orthomerge.merging.methods import FITTED, METHODS

Maker = Callable[..., Any]
Row = Any  # of any table: name, maker, title, reference, and marks of its own
_GUIDE = Path(__file__).parents[1] / "fitting.md"
_OURS = {"orthomerge", "this project"}
# What options mean of which neither class nor guide says it; what these say comes first.
_SAID = {
    "moma": {
        "map_lr": "learning rate of the maps A",
        "alpha": "weight of the penalty for maps that are not orthogonal",
        "norm": "of the distance to the expert's features",
        "penalty": "norm of A^T A - I",
        "decay": "weight of the squared mask",
    },
    "adamerging": {
        "vectors": "`ties` trims and elects first: AdaMerging++",
        "density": "of `vectors: ties`: share of entries that survive the trim",
    },
    "concrete_ta": {"temperature": "of the random mask; the lower, the nearer to 0 and 1"},
    "concrete_am": {
        "temperature": "of the random mask; the lower, the nearer to 0 and 1",
        "start": "every coefficient at first",
        "final": "the mask that stays: a last sample, without noise, or positive logits only",
    },
    "model_tailor": {
        "damping": "added to the diagonal of G, as a share of its mean",
        "block": "columns that are scored together",
    },
    "aligned-c": {"epochs": "how often all inputs are seen", "most": "at most so many steps"},
    "orth-m": {"decay": "the learning rate falls to zero along a cosine"},
}


def tables() -> dict[str, Mapping[str, Row]]:
    """The tables by the folder that their pages are in."""
    return {"methods": METHODS, "fitted": FITTED, "aligners": ALIGNERS, "protocols": PROTOCOLS}


def slug(name: str) -> str:
    """A row's name as the name of a file."""
    return name.replace("@", "-at-")


def pages() -> dict[str, str]:
    """Path to text of all pages."""
    names = _names()
    return {
        f"reference/{kind}/{slug(row.name)}.md": page(kind, row, names)
        for kind, rows in tables().items()
        for row in rows.values()
    }


def page(kind: str, row: Row, names: Mapping[str, str] | None = None) -> str:
    """One row as Markdown: what it is, formula, options, differences, how to ask for it."""
    maker = maker_of(row)
    module = sys.modules[maker.__module__]
    doc = doc_of(maker)
    lead, _ = option_texts(about_options(maker), schema(maker))
    told = "\n".join(f"- **{name}:** {what}" for name, what in facts(kind, row, maker))
    text = [f"# {row.name}", doc.summary or f"{prose(row.title)}.", told]
    text += ["## What it does", *doc.body] if doc.body else []
    text += [f"*Letters:* {doc.letters}."] if doc.letters else []
    text += _borrowed(module, row)
    options = options_table(maker, guided(row.name), common=COMMON | _SAID.get(row.name, {}))
    text += ["## Options", lead if options else "", options or lead or "It has none."]
    text += ["## How to ask for it", *_use(kind, row, maker)]
    text += ["## Where it differs", *_differs(doc, row)]
    linked = [_with_links(block, names or {}, row.name) for block in text if block]
    return "\n\n".join(linked) + "\n"


def doc_of(maker: Maker) -> Doc:
    """What is said of a row: in the module of a class, or by a function, whose paragraph about options is left out."""
    if isinstance(maker, type):
        return parse(sys.modules[maker.__module__].__doc__)
    doc = parse(inspect.getdoc(maker))
    return replace(doc, body=tuple(block for block in doc.body if not block.startswith("`")))


def guided(name: str, guide: str | None = None) -> dict[str, str]:
    """What the guide to fitted merges says of a method's options, in the section that has its name."""
    text = (_GUIDE.read_text("utf-8") if _GUIDE.is_file() else "") if guide is None else guide
    section = re.search(rf"(?ims)^## {re.escape(name)}$(.*?)(?=^## |\Z)", text)
    listed = re.search(r"(?m)^\| option \| default \| meaning \|\n\|.*\n((?:\|.*\n)+)", section[1]) if section else None
    found: dict[str, str] = {}
    for names, meaning in re.findall(r"(?m)^\| (.+?) \|.*\| (.+) \|$", listed[1] if listed else ""):
        found |= {one: meaning.replace("](#", "](../../fitting.md#") for one in re.findall(r"`(\w+)`", names)}
    return found


def facts(kind: str, row: Row, maker: Maker) -> list[tuple[str, str]]:
    """What the table and the maker say of a row, in words."""
    reference = "ours" if row.reference in _OURS else prose(row.reference)
    found = [("reference", reference)]
    if kind == "methods":
        found += [("looks at", "weights alone"), ("needs", _experts(row)), ("memory", _memory(maker))]
    elif kind == "fitted":
        found += [("looks at", "weights, and unlabelled inputs of every task"), ("needs", _experts(row))]
        found += [("memory", "not streamed: see [the engine](../../fitting.md#the-engine)")]
    elif kind == "aligners":
        found += [("looks at", "features of unlabelled inputs, under the merged encoder and under the expert")]
        found += [("adds", "parameters of its own, counted" if row.extra else "nothing: the head keeps its size")]
    else:
        words = {
            "features": "merged features of support inputs",
            "labels": "their labels",
            "teacher": "the expert's outputs",
        }
        needs = [words.get(need, need) for need in sorted(row.needs)]
        found += [("looks at", ", ".join(needs) or "nothing but the test inputs")]
    return [*found, ("source", f"`{row.maker.partition(':')[0].replace('.', '/')}.py`")]


def example(row: Row, maker: Maker) -> dict[str, Any]:
    """Options of a row with their defaults: those that have one."""
    made = {name: plain(field.default) for name, (_, field) in schema(maker).items() if _simple(field.default)}
    made.pop("seed", None)
    return made


def _use(kind: str, row: Row, maker: Maker) -> list[str]:
    options = example(row, maker)
    first = next(iter(options.items()), None)
    setting = f" --set {first[0]}={_flow(first[1])}" if first else ""
    given = _block(options, deep=4 if kind == "aligners" else 2)
    experts = "experts: {sst2: ./sst2, topic: ./topic}"
    data = "data: {sst2: sst2.csv, topic: topic.csv}"
    both = "--expert sst2=./sst2 --expert topic=./topic"
    inputs = "--data sst2=sst2.csv --data topic=topic.csv"
    recipe = ""
    if kind in ("methods", "fitted"):
        fit = f"\nfit:\n  {data}" if kind == "fitted" else ""
        recipe = f"base: ./base\n{experts}\nmethod: {row.name}\nparameters:{given}{fit}\nout: ./merged"
        lines = [f"merge --base ./base {both}", inputs if fit else "", f"--method {row.name}{setting} --out merged"]
    elif kind == "aligners":
        block = f"align:\n  {data}\n  aligner: {row.name}\n  options:{given}"
        recipe = f"base: ./base\n{experts}\n{block}\nout: ./aligned"
        lines = [f"align merged {both}", inputs, f"--aligner {row.name}{setting} --out aligned"]
    else:
        lines = [f"evaluate merged {both}", inputs, f"--protocol {row.name} --out run"]
    command = "orthomerge " + " \\\n    ".join(filter(None, lines))
    note = "The recipe has every option at its default; leave out what you do not change."
    return [f"```bash\n{command}\n```", *([f"```yaml\n{recipe}\n```", note] if recipe else [])]


def _differs(doc: Doc, row: Row) -> list[str]:
    if doc.differs:
        return [f"**From {whom}:** {text}" for whom, text in doc.differs]
    ours = row.reference in _OURS
    return ["There is no paper to differ from." if ours else "The module names no difference."]


def _borrowed(module: Any, row: Row) -> list[str]:
    """What the module leaves to a neighbour that is no row (`see least_squares`): its text, under its name."""
    folder = Path(inspect.getfile(module)).parent
    rows = {one.maker.partition(":")[0] for rows in tables().values() for one in rows.values()}
    text: list[str] = []
    for name in dict.fromkeys(re.findall(r"`([a-z_]+)`", module.__doc__ or "")):
        file = folder / f"{name}.py"
        if f"{module.__package__}.{name}" in rows or not file.is_file():
            continue
        doc = parse(ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")), clean=False))
        letters = [f"*Letters:* {doc.letters}."] if doc.letters else []
        text += [f"### From `{name}`", doc.summary, *doc.body, *letters] if doc.summary else []
    return text


def _names() -> dict[str, str]:
    """Names and class names of rows to their pages, as seen from a page of a row; the first that has a name has it."""
    found: dict[str, str] = {}
    for kind, rows in tables().items():
        for row in rows.values():
            target = f"../{kind}/{slug(row.name)}.md"
            found.setdefault(row.name, target)
            found.setdefault(row.maker.rpartition(":")[2], target)
    return found


def _with_links(block: str, names: Mapping[str, str], own: str) -> str:
    """Names of other rows in running text become links; tables, headings and code stay as they are."""
    if block.startswith(("```", "|", "#")):
        return block
    return re.sub(
        r"(?<!\[)`([\w@-]+)`(?!\])",
        lambda match: f"[{match[0]}]({names[match[1]]})" if match[1] in names and match[1] != own else match[0],
        block,
    )


def _experts(row: Row) -> str:
    fewest, most = row.experts
    count = f"exactly {fewest} experts" if fewest == most else f"{fewest} or more experts" if fewest > 1 else "experts"
    return f"{count} and {'their base' if row.base else 'no base'}"


def _memory(maker: Maker) -> str:
    return "matrix by matrix" if getattr(maker, "scope", "element") == "matrix" else "streams"


def _simple(value: Any) -> bool:
    return isinstance(value, bool | int | float | str) or (isinstance(value, tuple) and bool(value))


def _block(options: dict[str, Any], *, deep: int) -> str:
    """Options behind a key: on its line if they are few, else one a line."""
    line = _flow(options)
    if len(line) < 90:
        return f" {line}"
    return "".join(f"\n{' ' * deep}{name}: {_flow(value)}" for name, value in options.items())


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).strip()
    return text.removesuffix("...").strip()
