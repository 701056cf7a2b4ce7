"""Links lead somewhere, and code in the documents is code: it compiles, parses, and names what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from docs.generator.commands import command_tree
from tests.docs.reading import PAGES, ROOT, anchors, blocks, check_call, commands, find_command, inline, links

from orthomerge.cli.app import app
from orthomerge.runs.recipe import read_recipe

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
BLOCKS = [(page, number, kind, text) for page in PAGES for number, (kind, text) in enumerate(blocks(page), 1)]


def _of(*kinds: str) -> pytest.MarkDecorator:
    chosen = [block for block in BLOCKS if block[2] in kinds]
    assert chosen
    names = [f"{page.relative_to(ROOT)}:{number}" for page, number, _, _ in chosen]
    return pytest.mark.parametrize(("page", "text"), [(page, text) for page, _, _, text in chosen], ids=names)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            assert link.startswith("https://"), link
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), f"{link} leaves the repository"
        assert target.exists(), f"{link} is not there"
        if anchor:
            assert anchor in anchors(target), f"{link}: there is no such heading"


@_of("python", "py")
def test_python_compiles(page: Path, text: str) -> None:
    compile(text, str(page), "exec")


@_of("yaml")
def test_recipes_are_read(page: Path, text: str, tmp_path: Path) -> None:
    document = yaml.safe_load(text)
    if isinstance(document, dict) and {"experts", "merge_method"} & set(document):
        (tmp_path / "recipe.yaml").write_text(text)
        assert read_recipe(tmp_path / "recipe.yaml").experts


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_json_parses(page: Path) -> None:
    for kind, text in blocks(page):
        if kind == "json":
            json.loads(text)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_are_as_they_are_called(page: Path) -> None:
    for words in commands(page):
        if words[0] == "make":
            _check_target(words[1])
        else:
            check_call(words[1:])


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_in_running_text_are_there(page: Path) -> None:
    groups = {path[0] for path, _ in command_tree(app)} | {"COMMAND"}
    for code in inline(page) if page.name != "CHANGELOG.md" else ():  # a changelog names what is gone
        words = code.split()
        if words[0] == "make" and len(words) > 1:
            _check_target(words[1])
        if words[0] != "orthomerge" or len(words) < 2 or words[1].startswith(("-", "=")):
            continue
        assert words[1] in groups, code
        if len(words) > 2 and words[1] != "COMMAND":
            command, rest = find_command(words[1:])
            known = {sign for one in command.params for sign in (*one.opts, *one.secondary_opts)} | {"--help"}
            assert {word for word in rest if word.startswith("--")} <= known, code


def test_files_that_contributors_open_exist() -> None:
    names = re.findall(r"`([\w/]+\.(?:py|md))`", (ROOT / "CONTRIBUTING.md").read_text())
    paths = [name for name in names if "/" in name and "NAME" not in name]
    assert len(paths) > 30
    assert [
        path for path in paths if not any((root / path).is_file() for root in (ROOT, ROOT / "src/orthomerge"))
    ] == []


def test_a_wrong_option_would_be_found() -> None:
    with pytest.raises(Exception, match="--experts"):
        check_call(["merge", "--experts", "a=b"])


def test_anchors_are_those_of_github(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# A page\n\n## 3. Does `it` do, well? Nearly: yes\n\n```\n# no heading\n```\n")
    assert anchors(tmp_path / "page.md") == {"a-page", "3-does-it-do-well-nearly-yes"}


def _check_target(name: str) -> None:
    assert re.search(rf"(?m)^{re.escape(name)}:", (ROOT / "Makefile").read_text()), (
        f"make {name}: there is no such target"
    )
