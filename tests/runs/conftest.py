"""One cache for all tests of runs: it has the secret that their stores are sealed with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORTHOMERGE_CACHE", str(tmp_path_factory.getbasetemp() / "runs-cache"))
        yield
