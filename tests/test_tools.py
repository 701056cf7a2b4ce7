"""The lock has the pins of the constraints, and the walk counts cycles."""

from __future__ import annotations

from pathlib import Path

from tools.walk import stale_names, static_numbers

ROOT = Path(__file__).parents[1]


def pins(name: str) -> set[str]:
    """`name==version` of every line of a requirements file that pins one."""
    lines = (line for line in (ROOT / name).read_text().splitlines() if "==" in line and not line.startswith("#"))
    return {line.split()[0].lower().replace("_", "-") for line in lines}


def test_the_lock_is_that_of_the_constraints() -> None:
    assert pins("constraints.txt") == pins("requirements-dev.lock"), "run `make lock`"
    lines = (ROOT / "requirements-dev.lock").read_text().splitlines()
    assert sum("--hash=sha256:" in line for line in lines) >= len(pins("requirements-dev.lock"))


def test_the_walk_counts_functions_that_exist() -> None:
    assert stale_names(ROOT / "src" / "orthomerge") == []


def test_the_walk_counts_imports_inside_functions_but_not_those_for_types(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "one.py").write_text("from package.two import b\n\ndef a():\n    return 1\n")
    (package / "two.py").write_text("def b():\n    from package.one import a\n    return a\n")
    (package / "three.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package.four import d\n"
    )
    (package / "four.py").write_text("from package.three import c\n")
    numbers = static_numbers(package)
    assert numbers["modules in cycles"] == 2
    assert (numbers["files"], numbers["lines"], numbers["lazy pairs"]) == (4, 11, 1)
