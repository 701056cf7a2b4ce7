"""The lock has the pins of the constraints, and the tools name what exists."""

from __future__ import annotations

from pathlib import Path

from tools.lowest import lowest
from tools.size import TARGETS, static_numbers
from tools.walk import stale_names

ROOT = Path(__file__).parents[1]


def pins(name: str) -> set[str]:
    """`name==version` of every line of a requirements file that pins one."""
    lines = (line for line in (ROOT / name).read_text().splitlines() if "==" in line and not line.startswith("#"))
    return {line.split()[0].lower().replace("_", "-") for line in lines}


def test_the_lock_is_that_of_the_constraints() -> None:
    assert pins("constraints.txt") == pins("requirements-dev.lock"), "run `make lock`"
    lines = (ROOT / "requirements-dev.lock").read_text().splitlines()
    assert sum("--hash=sha256:" in line for line in lines) >= len(pins("requirements-dev.lock"))


def test_every_floor_but_that_of_torch_is_tested() -> None:
    core, extra = 'dependencies = ["torch>=2.10", "numpy>=2.0,<3"]', 'all = ["us[dev]", "six>=1"]'
    assert lowest(f"[project]\n{core}\n[project.optional-dependencies]\n{extra}") == ["numpy==2.0", "six==1"]


def test_the_walk_counts_functions_that_exist() -> None:
    assert stale_names() == []


def test_static_numbers_by_hand(tmp_path: Path) -> None:
    package = tmp_path / "ours" / "p"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text('"""Ours."""\n')
    (package / "a.py").write_text('"""Two\nlines."""\nfrom ours.p.b import x\n\n\ndef f(**more):\n    return x\n')
    (package / "b.py").write_text("def g():\n    from ours.p.a import f\n\n    return f()\n\n\nx = 1\n")
    numbers = static_numbers(package.parent)
    assert numbers.keys() == TARGETS.keys()
    assert {name: number for name, number in numbers.items() if number} == {
        "lines": 15, "statements": 5, "files": 3, "root files": 1, "modules in cycles": 2, "lazy pairs": 1,
        "functions with **kwargs": 1, "docstrings, % of lines": 20,
    }  # fmt: skip
