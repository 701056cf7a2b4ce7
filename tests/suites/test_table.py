"""The table of suites."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from orthomerge.core.errors import CheckpointError, RecipeError
from orthomerge.suites.digits import digit_tasks
from orthomerge.suites.table import SUITES, build_suite, find_suite


def test_every_row_names_a_maker_that_exists() -> None:
    for name, row in SUITES.items():
        assert row.name == name
        module, _, function = row.maker.partition(":")
        assert callable(getattr(import_module(f"orthomerge.suites.{module}"), function))
        assert len(set(row.tasks)) == len(row.tasks) >= 5


def test_the_row_of_digits_names_its_tasks() -> None:
    assert SUITES["digits"].tasks == tuple(digit_tasks())


def test_an_unknown_suite(tmp_path: Path) -> None:
    assert find_suite("text8").name == "text8"
    with pytest.raises(RecipeError, match=r"unknown suite 'digit'; did you mean 'digits'\?"):
        build_suite("digit", folder=tmp_path)


@pytest.mark.parametrize(("name", "file"), [("text8", "ag_news.jsonl.gz"), ("vision8", "mnist.npz")])
def test_data_that_is_not_there(name: str, file: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"give it with --data .wanted: {file}"):
        build_suite(name, folder=tmp_path / "suite")
    with pytest.raises(CheckpointError, match=f"has no {file} or .*; give the folder that holds"):
        build_suite(name, folder=tmp_path / "suite", data=tmp_path)
    assert not (tmp_path / "suite").exists()
