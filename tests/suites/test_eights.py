"""`text8` and `vision8`, built of data that is made up in a moment."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from orthomerge.suites import text8, vision8
from orthomerge.suites.table import SUITES, build_suite
from orthomerge.tuning.settings import Tuning

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SPLITS = {"train": 20, "test": 8}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def shorten(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """One step each."""
    for name, value in list(vars(module).items()):
        if isinstance(value, Tuning):
            monkeypatch.setattr(module, name, replace(value, steps=1))


def notes(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["orthomerge"]
    return found


def test_vision8_is_built_by_its_constants(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for place, name in enumerate(SUITES["vision8"].tasks):
        shape = (28, 28) if place % 2 else (32, 32, 3)
        arrays: dict[str, Any] = {
            f"x_{split}": random.integers(0, 256, (n, *shape), dtype=np.uint8) for split, n in SPLITS.items()
        }
        arrays |= {f"y_{split}": np.arange(n) % 2 for split, n in SPLITS.items()}
        np.savez(tmp_path / f"{name}.npz", **arrays, label_names=np.array(["a", "b"]))
    assert all(given.augment == "shift" for given in (vision8.TUNING, vision8.PRETRAINING, vision8.JOINT))
    assert vision8.PRETRAINING.batch == 256
    shorten(monkeypatch, vision8)
    monkeypatch.setattr(vision8, "SHAPE", {**vision8.SHAPE, "hidden_size": 12, "num_hidden_layers": 1})
    monkeypatch.setattr(vision8, "JOINT", replace(vision8.JOINT, lr=0.125))
    said: list[str] = []
    suite = build_suite("vision8", folder=tmp_path / "suite", data=tmp_path, device="cpu", say=said.append)
    assert len(said) == 2 + 8 + 1
    assert json.loads((suite.base / "config.json").read_text())["hidden_size"] == 12
    assert notes(suite.folder / "experts" / "gtsrb")["tuning"]["lr"] == vision8.TUNING.lr
    assert notes(suite.mtl["gtsrb"])["tuning"]["lr"] == 0.125


def test_text8_begins_with_base_and_tasks(berts: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in SUITES["text8"].tasks:
        rows = [
            {"split": split, "text": f"{name} a {'good' if n % 2 else 'bad'} film", "label": n % 2, "label_name": n % 2}
            for split, count in SPLITS.items()
            for n in range(count)
        ]
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt") as file:
            file.writelines(f"{json.dumps({**row, 'label_name': str(row['label'])})}\n" for row in rows)
    shorten(monkeypatch, text8)
    given: dict[str, Any] = {"folder": tmp_path / "suite", "data": tmp_path, "base": str(berts / "base")}
    started = text8.start(**given, say=lambda text: None)
    assert sorted(path.name for path in started.folder.iterdir()) == ["base"]
    said: list[str] = []
    suite = build_suite("text8", **given, device="cpu", say=said.append)
    assert len(said) == 9
    assert suite.tasks.keys() == started.tasks.keys() == suite.paths.keys() == suite.mtl.keys()
    assert (
        notes(suite.mtl["subj"])["tuning"]["batch"] == 2 * notes(suite.folder / "experts" / "subj")["tuning"]["batch"]
    )
