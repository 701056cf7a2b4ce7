"""Features that were kept are used again, and no entry that is not sound."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.models.making import flip_a_bit

from orthomerge.core.errors import OutputError
from orthomerge.models.features import FeatureCache

KEY = {"weights": "a", "pooling": "cls"}
VALUES = torch.arange(6, dtype=torch.float32).reshape(3, 2)


@dataclass
class Compute:
    """Gives features and counts its calls."""

    values: torch.Tensor
    calls: int = 0

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        return self.values


@pytest.fixture
def cache(tmp_path: Path) -> FeatureCache:
    return FeatureCache(tmp_path / "cache")


def test_features_are_computed_once(cache: FeatureCache) -> None:
    compute = Compute(VALUES.double())
    for each in (cache, cache, FeatureCache(cache.folder)):
        values = each.get_or_compute(dict(reversed(KEY.items())), 3, compute)
        assert (values.tolist(), values.dtype) == (VALUES.tolist(), torch.float32)
    assert compute.calls == 1
    other = {**KEY, "pooling": "mean"}
    assert cache.get_or_compute(other, 3, Compute(VALUES + 1)).tolist() == (VALUES + 1).tolist()
    assert len(list(cache.folder.iterdir())) == 2


def other_name(path: Path) -> None:
    cache, key = FeatureCache(path.parent), {"weights": "b"}
    cache.get_or_compute(key, 3, Compute(VALUES + 9))
    cache.path(key).replace(path)


def other_rows(path: Path) -> None:
    path.unlink()
    FeatureCache(path.parent).get_or_compute(KEY, 4, Compute(torch.zeros(4, 2)))


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "a bit": flip_a_bit,
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "empty": lambda path: path.write_bytes(b""),
    "zero pages": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "no seal": lambda path: save_file({"values": VALUES}, path),
    "another dtype": lambda path: save_file({"values": VALUES.double()}, path),
    "another tensor": lambda path: save_file({"features": VALUES}, path),
    "another name": other_name,
    "other rows": other_rows,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_computed_again(cache: FeatureCache, damage: Callable[[Path], Any]) -> None:
    cache.get_or_compute(KEY, 3, Compute(VALUES))
    damage(cache.path(KEY))
    compute = Compute(VALUES)
    for _ in range(2):
        assert cache.get_or_compute(KEY, 3, compute).tolist() == VALUES.tolist()
    assert compute.calls == 1


def test_two_may_write_at_once(cache: FeatureCache) -> None:
    values = torch.arange(160_000, dtype=torch.float32).reshape(20_000, 8)

    def write_many_times(writer: int) -> None:
        for number in range(15):  # of an entry that is there, one reads while the other writes
            if (number + writer) % 2:
                cache.path(KEY).unlink(missing_ok=True)
            assert torch.equal(cache.get_or_compute(KEY, 20_000, Compute(values)), values)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write_many_times, range(2)))
    assert [path.suffix for path in cache.folder.iterdir()] == [".safetensors"]


def test_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ORTHOMERGE_CACHE", raising=False)
    assert FeatureCache().folder == tmp_path / ".cache/orthomerge/features"
    assert FeatureCache("~/mine").folder == tmp_path / "mine"
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path / "elsewhere"))
    assert FeatureCache().folder == tmp_path / "elsewhere/features"
    assert not (tmp_path / "elsewhere").exists()
    monkeypatch.setenv("ORTHOMERGE_CACHE", "~nobody-of-this-name/cache")
    with pytest.raises(OutputError, match=r"cannot keep features in ~nobody.*set ORTHOMERGE_CACHE to a folder"):
        FeatureCache()


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_computed(
    cache: FeatureCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = Compute(VALUES)
    cache.folder.write_text("a file")
    with pytest.raises(OutputError, match=r"cannot keep features in .*: File exists; set ORTHOMERGE_CACHE"):
        cache.get_or_compute(KEY, 3, compute)
    cache.folder.unlink()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OutputError, match=r"cannot keep features in .*: no permission"):
        cache.get_or_compute(KEY, 3, compute)
    assert compute.calls == 0


def test_nothing_is_left_of_an_entry_that_was_not_written(cache: FeatureCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"cannot write .*: No space left on device; make room"):
        cache.get_or_compute(KEY, 3, Compute(VALUES))
    assert list(cache.folder.iterdir()) == []
