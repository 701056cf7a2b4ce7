"""Pages that are generated from docstrings, types, tables and commands."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import yaml
from docs.generator.architecture import MAP, PAGE, package_map, packages
from docs.generator.commands import cli_page, command_tree
from docs.generator.options import guide_texts, markdown, option_texts, options_table, prose, recipe_page, sections
from docs.generator.rows import TABLES, page
from docs.generator.site import ROOT, recipe_schema
from tests.docs.reading import check_call

from orthomerge.cli.app import app
from orthomerge.core.schema import maker_of, schema
from orthomerge.runs.recipe import Recipe

ROWS = [(kind, row) for kind, table in TABLES.items() for row in table.values()]


def test_docstrings_become_markdown() -> None:
    text = """One sentence
    over two lines.

    Someone et al., arXiv 2306.01708 v2: x <= 1, `a < b`.

        y = A x,

    *Letters:* x [n, d]. Differs from the paper: in one thing.
    """
    assert markdown(text) == [
        "One sentence\nover two lines.",
        "Someone et al., [arXiv 2306.01708 v2](https://arxiv.org/abs/2306.01708v2): x &lt;= 1, `a < b`.",
        "```text\ny = A x,\n```",
        "**Letters:** x [n, d].",
        "**Differs from the paper:** in one thing.",
    ]
    assert markdown(None) == markdown(" \n ") == []
    assert prose("<script> and `<b>`") == "&lt;script> and `<b>`"


@pytest.mark.parametrize(
    ("text", "names", "lead", "texts"),
    [
        ("Lead. `a`, `b`: both; `c` of the draws.", "abc", "Lead.", {"a": "both", "b": "both", "c": "of the draws"}),
        ("Lead.\n\n`a` and `b` are alike; `c`: one.", "abc", "Lead. `a` and `b` are alike;", {"c": "one"}),
        ("See the module. `a`: see `c` there.", "a", "", {"a": "see `c` there"}),
        ("Has no fields.", "", "Has no fields.", {}),
        (None, "a", "", {}),
    ],
)
def test_what_a_class_says_of_its_fields(text: str, names: str, lead: str, texts: dict[str, str]) -> None:
    assert option_texts(text, names) == (lead, texts)


@dataclass(frozen=True)
class Inner:
    """What is inside. `one`: a number | or not."""

    one: int = 1
    two: str | None = None


@dataclass(frozen=True)
class Outer:
    """Everything."""

    name: str
    kind: Literal["a", "b"] = "a"
    parts: tuple[Inner | str, ...] = (Inner(),)
    more: Mapping[str, Inner] = field(default_factory=dict)


def test_types_become_tables() -> None:
    assert options_table(Inner, "inner", {"two": "of the guide"}).splitlines()[2:] == [
        "| `one` | a number \\| or not | whole number | `1` |",
        "| `two` | of the guide | text | *none* |",
    ]
    defaults = [row.split(" | ")[-1] for row in options_table(Outer, "outer", {}).splitlines()[2:]]
    assert defaults == ["*required* |", "`a` |", "*as described* |", "`{}` |"]
    assert list(sections(Outer)) == [("", Outer), ("parts[]", Inner), ("more.NAME", Inner)]
    guide = "| option | default | meaning |\n|---|---|---|\n| `a`, `b` | 1 | [x](#c), [y](d.md#e) |\n"
    assert guide_texts(guide) == dict.fromkeys("ab", "x, y")


def test_every_key_of_a_recipe_is_explained() -> None:
    text = recipe_page(Recipe, guide_texts((ROOT / "docs/recipes.md").read_text()))
    assert re.findall(r"(?m)^\| `(\w+)` \|  \|", text) == []
    keys = {name for _, part in sections(Recipe) for name in schema(part)}
    assert keys == set(re.findall(r"(?m)^\| `(\w+)` \|", text))


@pytest.mark.parametrize(("kind", "row"), ROWS, ids=[f"{kind}/{row.name}" for kind, row in ROWS])
def test_every_row_has_a_page(kind: str, row: Any) -> None:
    text = page(kind, row)
    title, summary, *_ = text.split("\n\n")
    assert (title, len(summary) > 20) == (f"# {row.name}", True)
    assert ("](https://arxiv.org/abs/" in text) >= ("arXiv" in row.reference)
    assert [name for name in schema(maker_of(row)) if f"| `{name}` |" not in text] == []
    assert re.findall(r"(?m)^\| `(\w+)` \|  \|", text) == [], "every option needs an explanation"
    assert text.count("`") % 2 == 0
    command = text.partition("```bash\northomerge ")[2].partition("```")[0]
    check_call(command.replace("\\\n", " ").split())


def test_every_command_has_its_help() -> None:
    text = cli_page(app)
    assert [words for words, _ in command_tree(app) if f"Usage: orthomerge {' '.join(words)} " not in text] == []


@pytest.mark.parametrize("name", ["run", "sweep"])
def test_the_schema_agrees_with_the_examples(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")  # comes with Ray
    schema = json.loads(recipe_schema())
    recipe = yaml.safe_load((ROOT / f"examples/{name}.yaml").read_text())
    jsonschema.validate(recipe, schema)
    for wrong in ({"methd": "ties"}, {"seed": "3"}, {"evaluate": {"data": {}, "protocol": "knn"}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(recipe | wrong, schema)


def test_the_map_of_the_packages_is_current() -> None:
    """Order and docstrings; counts of files and lines may lag behind."""
    written = MAP.findall(PAGE.read_text("utf-8"))
    names = [[row.rsplit("|", 3)[0] for row in text.splitlines()] for text in (*written, package_map())]
    assert names[0] == names[1], "run: python -m docs.generator.architecture"
    source = ROOT / "src/orthomerge"
    assert {path.parent.name for path in source.glob("*/__init__.py")} <= set(packages())
    assert {path.name for path in source.glob("*.py")} == {"__init__.py", "__main__.py"}
