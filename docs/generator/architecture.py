"""The map of the packages in docs/architecture.md, from their docstrings and the import contract of pyproject.toml.

Run `python -m docs.generator.architecture` after a change of either; a test compares.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
_MAP = re.compile(r"(?s)(?<=<!-- map -->\n).*(?=<!-- /map -->)")


def packages(root: Path = ROOT) -> list[str]:
    """Names of the packages in import order: a package imports only from those before it."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = next(contract["layers"] for contract in settings["contracts"] if contract["type"] == "layers")
    return [name.strip() for layer in reversed(layers) for name in layer.strip("()").split("|")]


def package_map(root: Path = ROOT) -> str:
    """Markdown table with one line per package: its name, what its docstring says, its files and lines."""
    rows = ["| package | contains | files | lines |", "|---|---|---:|---:|"]
    for name in packages(root):
        folder = root / "src" / "orthomerge" / name
        if not folder.is_dir():
            continue  # a package that the contract already has a place for
        purpose = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
        if not purpose:
            raise SystemExit(f"{folder / '__init__.py'} has no docstring")
        files = sorted(folder.rglob("*.py"))
        lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        # Rounded, so that the page changes with the structure and not with every commit.
        rows.append(f"| `{name}` | {purpose.splitlines()[0]} | {len(files)} | {max(round(lines, -2), 100)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Write the map into the page."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_MAP.sub(lambda _: package_map(), text), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")


def written_map() -> str:
    """The map as it stands in the page."""
    match = _MAP.search(PAGE.read_text(encoding="utf-8"))
    return match[0] if match else ""


if __name__ == "__main__":
    main()
