"""One tiny benchmark for all tests of evaluation."""

from __future__ import annotations

import pytest
from tests.analysis.making import Toy, make_toy


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy"))
