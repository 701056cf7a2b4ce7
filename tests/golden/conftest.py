"""The small world of golden values, written once per run, and a child process that works beside it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.golden.driver import Driver, start
from tests.golden.world import make_world

SOURCE = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture(scope="session")
def child(once: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """One child for all golden tests; commands start in a folder that holds `world`."""
    world = once("golden", lambda folder: make_world(folder / "world")) / "world"
    place = tmp_path_factory.mktemp("golden")
    shutil.copytree(world, place / "world")
    with start(SOURCE, place) as driver:
        yield driver
