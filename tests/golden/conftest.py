"""The small world of golden values, written once per run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.golden.world import make_world


@pytest.fixture(scope="session")
def lay_world(once: Callable[..., Path]) -> Callable[[Path], Path]:
    """`lay_world(place)`: put the world into the folder `place`, under the name `world`."""
    original = once("golden", lambda folder: make_world(folder / "world")) / "world"

    def copy(place: Path) -> Path:
        shutil.copytree(original, place / "world")
        return place

    return copy
