"""A merge of two tiny BERTs, in memory and in a folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import orthomerge as om

NAMES = ("two", "three")


@pytest.fixture(scope="session")
def model(berts: Path) -> om.Model:
    """The experts `two` and `three`, merged."""
    return om.merge({name: berts / name for name in NAMES}, "task_arithmetic", base=berts / "base", scale=0.5)


@pytest.fixture(scope="session")
def merged(once: Callable[..., Path], model: om.Model) -> Path:
    """The model in a folder, which no test may change."""
    return once("two-and-three", lambda folder: model.save(folder / "out")) / "out"


@pytest.fixture
def out(merged: Path, tmp_path: Path) -> Path:
    """A copy of that folder to change."""
    return Path(shutil.copytree(merged, tmp_path / "out", symlinks=True))
