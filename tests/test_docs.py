"""What the documents list is what there is."""

import re
from pathlib import Path

from orthomerge.alignment.aligners import ALIGNERS
from orthomerge.cli.app import app
from orthomerge.core.schema import schema
from orthomerge.merging.methods import METHODS
from orthomerge.models.families import FAMILIES
from orthomerge.runs.recipe import Recipe, read_recipe

ROOT = Path(__file__).parents[1]


def test_every_method_has_a_line() -> None:
    text = (ROOT / "docs" / "methods.md").read_text()
    assert [name for name in METHODS if f"`{name}`" not in text] == []


def test_every_recipe_key_has_a_line() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text()
    assert [name for name in schema(Recipe) if f"| `{name}` |" not in text] == []


def test_every_family_is_named() -> None:
    text = (ROOT / "docs" / "checkpoints.md").read_text()
    assert [name for name in FAMILIES if name not in text] == []


def test_every_aligner_has_a_line() -> None:
    text = (ROOT / "docs" / "alignment.md").read_text()
    assert [name for name in ALIGNERS if f"`{name}`" not in text] == []


def test_every_command_is_named() -> None:
    text = (ROOT / "README.md").read_text()
    names = list(app.commands)
    assert len(names) > 10
    assert [name for name in names if f"`{name}`" not in text] == []


def test_the_examples_of_alignment_are_sound(tmp_path: Path) -> None:
    blocks = re.findall(r"```(\w*)\n(.*?)```", (ROOT / "docs" / "alignment.md").read_text(), re.DOTALL)
    (tmp_path / "recipe.yaml").write_text(next(text for kind, text in blocks if kind == "yaml"))
    found = read_recipe(tmp_path / "recipe.yaml").align
    assert found is not None
    assert found.data["topic"] == str(tmp_path / "topic.jsonl.gz")
    for kind, text in blocks:
        if kind == "python":
            compile(text, "alignment.md", "exec")
