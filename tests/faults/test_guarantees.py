"""Promises of docs/guarantees.md, and fault cases that are held elsewhere, name tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.faults.cases import HELD

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py::\w+)`")


def promises() -> list[str]:
    lines = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("| ") and not line.startswith(("| promise |", "|---"))]


def test_every_promise_names_a_test() -> None:
    assert len(promises()) > 15
    assert [row for row in promises() if not NAMED.search(row)] == []


def test_every_test_that_is_named_exists() -> None:
    missing = []
    for test in {*NAMED.findall("\n".join(promises())), *HELD.values()}:
        file, _, name = test.partition("::")
        path = ROOT / file
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.exists() else ()
        if name not in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}:
            missing.append(test)
    assert missing == []
