"""What the site's generator makes of docstrings, types, tables and commands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import typer
from docs.generator.assemble import ROOT, assemble, contents, label_fences, link_rows, meanings, places, relink
from docs.generator.commands import cli_page, command_tree, find_command
from docs.generator.docstrings import Doc, option_texts, parse, prose
from docs.generator.rows import guided, page, pages, slug, tables
from docs.generator.types import blocks, default, options_table, plain, recipe_page

from orthomerge.alignment.aligners import make_aligner
from orthomerge.cli.app import app
from orthomerge.core.rows import maker_of
from orthomerge.core.schema import schema
from orthomerge.merging.methods import make_method
from orthomerge.runs.recipe import Recipe, read_recipe

ROWS = [(kind, row) for kind, table in tables().items() for row in table.values()]
NAMES = [f"{kind}/{row.name}" for kind, row in ROWS]

DOCSTRING = """One sentence
over two lines.

Someone et al., "Title", 2023, arXiv 2306.01708 v2: x <= 1, `a < b`.

    y = A x,

    z = y.

Letters: x [n, d]; y [n].
What comes after the letters.
Differs from the paper: in one thing.

*Differs from mergekit:* in another; see arXiv
2311.03099.
"""


def test_a_docstring_in_its_parts() -> None:
    doc = parse(DOCSTRING)
    assert doc.summary == "One sentence over two lines."
    assert doc.body[0] == (
        'Someone et al., "Title", 2023, [arXiv 2306.01708 v2](https://arxiv.org/abs/2306.01708v2): x &lt;= 1, `a < b`.'
    )
    assert doc.body[1] == "```text\ny = A x,\n\nz = y.\n```"
    assert doc.body[2] == "What comes after the letters."
    assert doc.letters == "x [n, d]; y [n]"
    assert doc.differs == (
        ("the paper", "in one thing."),
        ("mergekit", "in another; see [arXiv 2311.03099](https://arxiv.org/abs/2311.03099)."),
    )


@pytest.mark.parametrize("text", [None, "", "\n  \n"])
def test_no_docstring_is_no_error(text: str | None) -> None:
    assert parse(text) == Doc()
    assert option_texts(text, ["a"]) == ("", {})


def test_long_formulas_stand_one_below_the_other() -> None:
    left, right = "L(tau) = sum_t ||(tau - tau_t) tau_t^T||_F^2 / ||tau_t||_F^2,", "grad L = 2 (tau G - C) and more,"
    assert parse(f"One.\n\n    {left}    {right}\n    x,    y").body == (f"```text\n{left}\n{right}\nx,    y\n```",)


def test_a_difference_in_the_middle_of_a_line() -> None:
    assert parse("One.\n\nIt is so. Differs from the paper: as `linear` does.").differs == (
        ("the paper", "as `linear` does."),
    )


def test_what_a_class_says_of_its_fields() -> None:
    text = "Lead. `a`, `b`: both; see `c` there. `c` of the draws.\n\n`d` and `e` are alike."
    lead, said = option_texts(text, ["a", "b", "c", "d", "e"])
    assert lead == "Lead. `d` and `e` are alike."
    assert said == {"a": "both; see `c` there", "b": "both; see `c` there", "c": "of the draws"}
    assert option_texts("See the module. `a`: one.", ["a"]) == ("", {"a": "one"})
    assert option_texts("Has no fields.", []) == ("Has no fields.", {})


def test_prose_is_never_markup_by_accident() -> None:
    assert prose("<script> and `<b>`") == "&lt;script> and `<b>`"


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
    parts: tuple[Inner | str, ...] = (Inner(), Inner(two="x"))
    more: Mapping[str, Inner] = field(default_factory=dict)


def test_types_as_tables() -> None:
    assert options_table(Inner).splitlines()[2:] == [
        "| `one` | a number \\| or not | whole number | `1` |",
        "| `two` |  | text | *none* |",
    ]
    known = schema(Outer)
    assert [default(one) for _, one in known.values()] == [
        "*required*",
        "`a`",
        "`[{one: 1}, {two: x}]`",
        "`{}`",
    ]
    assert plain(Inner(one=3)) == {"one": 3}
    assert list(blocks(Outer)) == [("", Outer), ("parts[]", Inner), ("more.NAME", Inner)]


def test_the_recipe_reference_has_every_field_of_every_block() -> None:
    made = recipe_page(Recipe, {"base": "What the guide says."})
    sections = re.split(r"(?m)^## ", made)[1:]
    found = dict(blocks(Recipe))
    assert len(sections) == len(set(found.values()))
    for section, (path, part) in zip(sections, found.items(), strict=True):
        assert section.startswith(f"`{path}`" if path else "The file")
        assert [name for name in schema(part) if f"| `{name}` |" not in section] == []
    assert "| `base` | What the guide says. |" in made
    for target in re.findall(r"\]\(#([\w-]+)\)", made):
        assert f"({target})=" in made
    assert "`docs/" not in made


def test_every_key_of_a_recipe_is_explained() -> None:
    guide = meanings((ROOT / "docs" / "recipes.md").read_text())
    made = recipe_page(Recipe, guide)
    assert re.findall(r"(?m)^\| `(\w+)` \|  \|", made) == []


@pytest.mark.parametrize(("kind", "row"), ROWS, ids=NAMES)
def test_every_row_has_a_page(kind: str, row: Any) -> None:
    made = page(kind, row)
    assert made.startswith(f"# {row.name}\n\n")
    assert "- **reference:** " in made
    assert "## Where it differs" in made
    described = made.partition("\n\n")[2].partition("\n\n")[0]
    assert len(described) > 20, "a sentence says what it is"
    assert [name for name in schema(maker_of(row)) if f"| `{name}` |" not in made] == []
    assert re.findall(r"(?m)^\| `(\w+)` \|  \|", made) == [], "every option has a word of explanation"
    if "arXiv" in row.reference:
        assert "](https://arxiv.org/abs/" in made
    assert all(len(line) < 2000 for line in made.splitlines())


@pytest.mark.parametrize(("kind", "row"), ROWS, ids=NAMES)
def test_what_a_page_shows_is_sound(kind: str, row: Any, tmp_path: Path) -> None:
    found = dict(re.findall(r"(?s)```(bash|yaml)\n(.*?)```", page(kind, row)))
    words = found["bash"].replace("\\\n", " ").split()
    assert words[0] == "orthomerge"
    command, rest = find_command(app, words[1:])
    command.make_context("orthomerge", list(rest))
    if kind == "protocols":
        return
    (tmp_path / "recipe.yaml").write_text(found["yaml"])
    recipe = read_recipe(tmp_path / "recipe.yaml")
    if kind == "aligners":
        assert recipe.align is not None
        make_aligner(row.name, recipe.align.options)
    else:
        assert recipe.method == row.name
        make_method(row.name, recipe.parameters, tasks=("sst2", "topic"))


def test_a_guides_words_on_options() -> None:
    guide = (
        "## Mine\n\n| option | default | meaning |\n|---|---|---|\n| `a`, `b` | 1, 2 | see [there](#x) |\n\n## Next\n"
    )
    assert guided("mine", guide) == {"a": "see [there](../../fitting.md#x)", "b": "see [there](../../fitting.md#x)"}
    assert guided("next", guide) == {}
    assert guided("none", guide) == {}


def test_a_row_that_says_nothing_still_has_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, row = ROWS[0]
    cls = maker_of(row)
    monkeypatch.setattr(cls, "__doc__", None)
    monkeypatch.setattr(f"{cls.__module__}.__doc__", None)
    made = page(kind, row)
    assert made.startswith(f"# {row.name}\n\n{row.title}.\n\n")
    assert "The module names no difference." in made


def test_pages_link_to_each_other() -> None:
    made = pages()
    assert len(made) == len(ROWS)
    text = made["reference/methods/ties_sum.md"]
    assert "[`ties`](../methods/ties.md)" in text
    for path, text in made.items():
        for link in re.findall(r"\]\((\.\./[^)#]+)", text):
            place = (Path(path).parent / link).as_posix()
            parts: list[str] = []
            for part in place.split("/"):
                parts = parts[:-1] if part == ".." else [*parts, part]
            assert "/".join(parts) in made or (ROOT / "docs" / "/".join(parts)).is_file(), (path, link)


def test_the_command_line_is_whole() -> None:
    made = cli_page(app)
    for words, command in command_tree(app):
        assert f"\n## {' '.join(words)}\n" in made
        section = made.partition(f"\n## {' '.join(words)}\n")[2].partition("\n## ")[0]
        for one in command.params:
            if one.param_type_name == "option" and not one.hidden:
                assert f"`{one.opts[0]}" in section
    with pytest.raises(KeyError, match="nothing"):
        find_command(app, ["nothing"])


def test_a_small_command_line() -> None:
    small = typer.Typer(help="Small.")

    @small.command()
    def go(path: str, often: int = 3) -> None:
        """Go."""

    @small.command()
    def stop() -> None:
        """Stop."""

    made = cli_page(small)
    assert "orthomerge go PATH [OPTIONS]" in made
    assert "| `--often` |  | `3` |" in made


def test_links_are_turned_to_where_things_are() -> None:
    known = places()
    text = (
        "[a](../benchmarks/results/text8.md#x) [b](#here) [c](https://x.org/a) ![d](images/report-desktop-light.png)\n"
    )
    assert relink(text, "docs/findings.md", known) == (
        "[a](benchmarks/text8.md#x) [b](#here) [c](https://x.org/a) ![d](images/report-desktop-light.png)\n"
    )
    code = "```\n[a](nowhere.md)\n```\n"
    assert relink(code, "docs/faq.md", known) == code
    with pytest.raises(ValueError, match=r"docs/faq\.md links to nowhere\.md, which is not there"):
        relink("[a](nowhere.md)", "docs/faq.md", known)
    assert (
        relink("[the code](../src/orthomerge/core/rows.py)", "docs/faq.md", known)
        == "the code (`src/orthomerge/core/rows.py`)"
    )


def test_what_is_no_page_stays_as_words() -> None:
    known = places()
    assert relink("[code](../Makefile)", "docs/faq.md", known) == "code (`Makefile`)"
    assert relink("[`Makefile`](../Makefile)", "docs/faq.md", known) == "`Makefile`"


def test_fences_without_a_language_get_one() -> None:
    text = "```\northomerge methods\n```\n\n```\na tree\n```\n\n```python\nx = 1\n```\n\nmake\n\n```yaml\na: 1\n```\n"
    assert label_fences(text) == text.replace("```\northo", "```bash\northo").replace("```\na tree", "```text\na tree")


def test_names_in_a_guides_first_column_lead_to_pages() -> None:
    assert link_rows("| `ties`, `other` | `dare` |\n", "methods.md") == (
        "| [`ties`](reference/methods/ties.md), `other` | `dare` |\n"
    )
    assert link_rows("| `ties` | x |\n", "faq.md") == "| `ties` | x |\n"
    assert slug("ties@peft") == "ties-at-peft"


def test_every_page_is_in_the_contents(tmp_path: Path) -> None:
    written = assemble(tmp_path / "source")
    texts = dict.fromkeys(written, "")
    listed: set[str] = set()
    for place, tree in contents({**texts, "new-page.md": ""}).items():
        folder = f"{place.rpartition('/')[0]}/" if "/" in place else ""
        for names in re.findall(r"```\{toctree\}\n(?::.*\n)*\n((?:[^`].*\n)+)```", tree):
            listed |= {f"{folder}{name}.md" for name in names.split()}
    assert listed == {*written, "new-page.md"} - {"index.md"}
    for path in (tmp_path / "source").rglob("*.md"):
        text = re.sub(r"(?ms)^ *```.*?^ *```$", "", path.read_text())
        assert [line for line in text.splitlines() if line.startswith("|") and line.count("`") % 2] == [], path
    assert (tmp_path / "source" / "images" / "report-desktop-light.png").is_file()
    assemble(tmp_path / "source")


def test_meanings_of_a_guides_table() -> None:
    text = "| `a` | `x` | see [b](b.md#c), `d` |\n| `e` | | [here](#f) |\n"
    assert meanings(text) == {"a": "see [b](../b.md#c), `d`", "e": "[here](../recipes.md#f)"}
