"""`text8` and `vision8`, built of small made-up data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orthomerge.suites import eights
from orthomerge.suites.table import SUITES, build_suite
from orthomerge.tuning.settings import Tuning

SPLITS = {"train": 20, "test": 8}


@pytest.fixture(autouse=True)
def one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in list(vars(eights).items()):
        if isinstance(value, Tuning):
            monkeypatch.setattr(eights, name, replace(value, steps=1))
    monkeypatch.setattr(eights, "SHAPE", {**eights.SHAPE, "hidden_size": 12, "num_hidden_layers": 1})


def tuning(folder: Path) -> Any:
    """The settings that an expert was trained with."""
    return json.loads((folder / "config.json").read_text())["orthomerge"]["tuning"]


def test_vision8(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for place, name in enumerate(SUITES["vision8"].tasks):
        shape = (28, 28) if place % 2 else (32, 32, 3)
        arrays = {f"x_{split}": random.integers(0, 256, (n, *shape), dtype=np.uint8) for split, n in SPLITS.items()}
        labels = {f"y_{split}": np.arange(n) % 2 for split, n in SPLITS.items()}
        np.savez(tmp_path / f"{name}.npz", **arrays, **labels, label_names=np.array(["a", "b"]))  # type: ignore[arg-type]
    lines: list[str] = []
    suite = build_suite("vision8", folder=tmp_path / "suite", data=tmp_path, device="cpu", say=lines.append)
    assert len(lines) == 2 + 8 + 1
    assert json.loads((suite.base / "config.json").read_text())["hidden_size"] == 12
    assert tuning(suite.folder / "experts" / "gtsrb")["batch"] == eights.VISION.batch
    assert tuning(suite.mtl["gtsrb"])["batch"] == eights.VISION_JOINT.batch
    assert tuning(suite.mtl["gtsrb"])["augment"] == "shift"


def test_text8(berts: Path, tmp_path: Path) -> None:
    for name in SUITES["text8"].tasks:
        rows = [
            {
                "split": split,
                "text": f"{name} a {'good' if n % 2 else 'bad'} film",
                "label": n % 2,
                "label_name": "ab"[n % 2],
            }
            for split, count in SPLITS.items()
            for n in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options: dict[str, Any] = {"folder": tmp_path / "suite", "data": tmp_path, "base": str(berts / "base")}
    started = eights.start_text(**options, say=lambda text: None)
    assert sorted(path.name for path in started.folder.iterdir()) == ["base"]
    suite = build_suite("text8", **options, device="cpu", say=lambda text: None)
    assert suite.tasks.keys() == started.tasks.keys() == suite.paths.keys() == suite.mtl.keys()
    assert tuning(suite.mtl["subj"])["batch"] == 2 * tuning(suite.folder / "experts" / "subj")["batch"]
