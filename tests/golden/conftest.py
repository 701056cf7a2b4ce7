"""The small world, made once per process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.golden.world import make_world


@pytest.fixture(scope="session")
def lay_world(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """`lay_world(place)`: put the world into the folder `place`, under the name `world`."""
    original = tmp_path_factory.mktemp("golden") / "world"
    make_world(original)

    def copy(place: Path) -> Path:
        shutil.copytree(original, place / "world")
        return place

    return copy
