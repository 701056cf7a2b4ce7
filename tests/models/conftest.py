"""A merge of two tiny BERTs, in memory and in a folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import orthomerge as om
from orthomerge.models.skeleton import quiet

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


@pytest.fixture
def live(berts: Path) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """The base with its tokenizer, and the experts, as models of transformers."""
    with quiet():
        from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertModel

        base = (BertModel.from_pretrained(berts / "base"), AutoTokenizer.from_pretrained(berts / "base"))
        return base, {name: AutoModelForSequenceClassification.from_pretrained(berts / name) for name in NAMES}
