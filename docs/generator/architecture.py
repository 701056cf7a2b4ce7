"""The map of the packages in docs/architecture.md, from their docstrings and the import contract of pyproject.toml.

Run `python -m docs.generator.architecture` after a change of either; a test compares.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
MAP = re.compile(r"(?s)(?<=<!-- map -->\n).*(?=<!-- /map -->)")


def packages() -> list[str]:
    """Names of the packages in import order: a package imports only from those before it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    layers = next(contract["layers"] for contract in settings["contracts"] if contract["type"] == "layers")
    return [name.strip() for layer in reversed(layers) for name in layer.strip("()").split("|")]


def package_map() -> str:
    """One row per package: name, first line of its docstring, and size, rounded so that it rarely changes."""
    rows = ["| package | contains | files | lines |", "|---|---|---:|---:|"]
    for name in packages():
        files = sorted((ROOT / "src" / "orthomerge" / name).rglob("*.py"))
        if files:  # the contract may have a place for a package to come
            purpose = ast.get_docstring(ast.parse(files[0].read_text("utf-8"))) or ""
            lines = sum(len(file.read_text("utf-8").splitlines()) for file in files)
            rows.append(f"| `{name}` | {purpose.splitlines()[0]} | {len(files)} | {max(round(lines, -2), 100)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(MAP.sub(lambda _: package_map(), PAGE.read_text("utf-8")), encoding="utf-8")
