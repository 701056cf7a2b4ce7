"""What the documents list is what there is."""

from pathlib import Path

from orthomerge.merging.methods import METHODS
from orthomerge.models.families import FAMILIES
from orthomerge.recipe import Recipe
from orthomerge.strict import schema

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
