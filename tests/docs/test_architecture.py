"""The map of packages in docs/architecture.md is that of the source."""

from __future__ import annotations

from pathlib import Path

from docs.generator.architecture import ROOT, package_map, packages, written_map


def test_the_map_in_the_page_is_the_map_of_the_source() -> None:
    """Docstrings and order are compared; counts of lines change with every commit."""
    without_counts = [[row.rsplit("|", 3)[0] for row in text.splitlines()] for text in (written_map(), package_map())]
    assert without_counts[0] == without_counts[1], "run: python -m docs.generator.architecture"


def test_every_folder_of_the_source_has_its_place_in_the_order() -> None:
    folders = {path.parent.name for path in Path(ROOT / "src" / "orthomerge").glob("*/__init__.py")}
    assert folders <= set(packages())


def test_only_two_modules_lie_at_the_root() -> None:
    assert {path.name for path in Path(ROOT / "src" / "orthomerge").glob("*.py")} == {"__init__.py", "__main__.py"}
