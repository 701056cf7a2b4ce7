"""The world that tests share: tiny experts, tables of inputs and a merge, written once per run.

Fixtures of this file give folders that no test may change; copy what is to be changed (`shutil.copytree`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock

if TYPE_CHECKING:
    from tests.analysis.making import Toy

os.environ.setdefault("HF_HUB_OFFLINE", "1")

Once = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache for all tests of a process, which is not the user's."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORTHOMERGE_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """`once(name, write)`: the folder `name`, filled by `write(folder)` once per run, also with several workers."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    (shared / "once").mkdir(exist_ok=True)

    def folder(name: str, write: Callable[[Path], object]) -> Path:
        place, complete = shared / "once" / name, shared / "once" / f"{name}.complete"
        with FileLock(f"{place}.lock"):
            if not complete.exists():
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir()
                write(place)
                complete.touch()
        return place

    return folder


@pytest.fixture(scope="session")
def toy(once: Once) -> Toy:
    """Two tiny image tasks with their base and experts; their features are kept beside them."""
    from tests.analysis.making import Toy, make_tasks, make_toy

    return Toy(once("toy", make_toy), make_tasks())


@pytest.fixture(scope="session")
def berts(once: Once) -> Path:
    """A folder with a tiny BERT `base` and experts `two`, `three` and `five`, named for their numbers of classes."""
    from tests.berts import write_berts

    return once("berts", write_berts)


@pytest.fixture(scope="session")
def tables(once: Once) -> Path:
    """A folder with TASK.csv for every expert of `berts`: columns text, label, split."""
    from tests.berts import write_tables

    return once("tables", write_tables)


@pytest.fixture(scope="session")
def merged_berts(once: Once, berts: Path) -> Path:
    """The output folder of the merge of all experts of `berts` by task arithmetic."""
    from tests.berts import merge_berts

    return once("merged", lambda folder: merge_berts(berts, folder / "out")) / "out"
