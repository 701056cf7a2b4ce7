"""Code in the documents compiles, parses and names what exists, and no name is left out; test_site.py follows links."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml
from docs.generator.commands import command_tree
from tests.docs.reading import PAGES, ROOT, blocks, check_call, commands, find_command, inline

from orthomerge.alignment.aligners import ALIGNERS
from orthomerge.cli.app import app
from orthomerge.core.schema import schema
from orthomerge.merging.methods import METHODS
from orthomerge.models.families import FAMILIES
from orthomerge.runs.recipe import Recipe, read_recipe

COMMANDS = {path[0] for path, _ in command_tree(app)}
every_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


@every_page
def test_code_is_sound(page: Path, tmp_path: Path) -> None:
    for kind, text in blocks(page):
        if kind in ("python", "py"):
            compile(text, str(page), "exec")
        elif kind == "json":
            json.loads(text)
        elif kind == "yaml":
            document = yaml.safe_load(text)
            if isinstance(document, dict) and {"experts", "merge_method"} & set(document):
                (tmp_path / "recipe.yaml").write_text(text)
                assert read_recipe(tmp_path / "recipe.yaml").experts


@every_page
def test_commands_are_accepted(page: Path) -> None:
    for words in commands(page):
        if words[0] == "make":
            check_target(words[1])
        else:
            check_call(words[1:])
    for code in inline(page) if page.name != "CHANGELOG.md" else ():  # a changelog names what is gone
        words = code.split()
        if words[0] == "make" and len(words) > 1:
            check_target(words[1])
        if words[0] != "orthomerge" or len(words) < 2 or words[1].startswith(("-", "=")) or words[1] == "COMMAND":
            continue
        assert words[1] in COMMANDS, code
        if len(words) > 2:
            command, rest = find_command(words[1:])
            options = {sign for one in command.params for sign in (*one.opts, *one.secondary_opts)} | {"--help"}
            assert {word for word in rest if word.startswith("--")} <= options, code


def check_target(name: str) -> None:
    assert re.search(rf"(?m)^{re.escape(name)}:", (ROOT / "Makefile").read_text()), f"make {name} does not exist"


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("docs/methods.md", METHODS),
        ("docs/alignment.md", ALIGNERS),
        ("docs/checkpoints.md", FAMILIES),
        ("docs/recipes.md", schema(Recipe)),
        ("README.md", COMMANDS),
    ],
)
def test_no_name_is_left_out(page: str, names: Iterable[str]) -> None:
    text = (ROOT / page).read_text()
    assert [name for name in names if not re.search(rf"\b{re.escape(name)}\b", text)] == []


def test_files_that_contributors_open_exist() -> None:
    names = re.findall(r"`([\w/]+\.(?:py|md))`", (ROOT / "CONTRIBUTING.md").read_text())
    paths = [name for name in names if "/" in name and "NAME" not in name]
    assert len(paths) > 30
    assert [
        path for path in paths if not any((root / path).is_file() for root in (ROOT, ROOT / "src/orthomerge"))
    ] == []


def test_types_of_the_glossary_exist() -> None:
    section = (ROOT / "docs/glossary.md").read_text().partition("## Types")[2].partition("\n## ")[0]
    names = re.findall(r"(?m)^\| `(\w+)`", section)
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert [name for name in names if not re.search(rf"(?m)^class {name}\b", source)] == []


def test_mistakes_are_noticed() -> None:
    with pytest.raises(Exception, match="--experts"):
        check_call(["merge", "--experts", "a=b"])
