"""Every promise in docs/guarantees.md names a test, and there is such a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def _rows() -> list[str]:
    lines = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("| ") and not line.startswith(("| promise |", "|---"))]


def test_every_promise_names_a_test() -> None:
    assert len(_rows()) > 15
    assert [row for row in _rows() if not _NAMED.search(row)] == []


def test_every_test_that_is_named_exists() -> None:
    missing = []
    for file, name in _NAMED.findall("\n".join(_rows())):
        path = ROOT / file
        functions = ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.exists() else ()
        if name not in {node.name for node in functions if isinstance(node, ast.FunctionDef)}:
            missing.append(f"{file}::{name}")
    assert missing == []
