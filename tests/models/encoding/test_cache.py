"""What is kept is found again, and nothing that is not sound is ever believed."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from orthomerge.core.errors import IncompatibleError, OutputError
from orthomerge.data.task import Examples
from orthomerge.models.extract import extract
from orthomerge.models.families import FAMILIES
from orthomerge.models.features import FeatureCache, FeatureKey

BERT = FAMILIES["bert"]

KEY = FeatureKey("weights", "data", "processor", "bert", "cls", "float32", 3)
VALUES = torch.arange(6, dtype=torch.float32).reshape(3, 2)


@dataclass
class Maker:
    """Computes features and counts how often it was asked."""

    values: torch.Tensor
    calls: int = 0

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        return self.values


@pytest.fixture
def cache(tmp_path: Path) -> FeatureCache:
    return FeatureCache(tmp_path / "cache")


def entry(cache: FeatureCache, key: FeatureKey = KEY) -> Path:
    return cache.folder / f"{key.digest}.safetensors"


def test_a_hit_does_not_compute(cache: FeatureCache) -> None:
    make = Maker(VALUES)
    for _ in range(3):
        values = cache.get_or_make(KEY, make)
        assert (values.tolist(), values.dtype) == (VALUES.tolist(), torch.float32)
    assert make.calls == 1
    assert FeatureCache(cache.folder).get_or_make(KEY, make).tolist() == VALUES.tolist()
    assert make.calls == 1


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "other"},
        {"data": "other"},
        {"processor": "other"},
        {"family": "roberta"},
        {"pooling": "mean"},
        {"autocast": "bfloat16"},
    ],
)
def test_whatever_features_depend_on_is_in_the_key(cache: FeatureCache, change: dict[str, Any]) -> None:
    cache.get_or_make(KEY, Maker(VALUES))
    make = Maker(VALUES + 1)
    assert cache.get_or_make(replace(KEY, **change), make).tolist() == (VALUES + 1).tolist()
    assert make.calls == 1
    assert len(list(cache.folder.iterdir())) == 2


def test_the_key_of_examples(texts: Examples, words: Any) -> None:
    def key(examples: Examples = texts, processor: Any = words) -> FeatureKey:
        return FeatureKey.of(examples, processor, weights="w", family="bert", pooling="cls")

    assert key() == key()
    assert key().rows == 23
    assert key().digest == key(texts.unlabelled()).digest
    assert key().digest != key(texts.take(range(22))).digest
    assert key().digest != key(Examples(texts.inputs[::-1], None, "test")).digest
    assert key().digest != key(processor=replace(words, longest=8)).digest


def spoil_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-40] ^= 1  # in the last of the values, before the seal
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zero_pages(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def other_tensors(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"values": VALUES}, path)


def other_dtype(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"values": VALUES.double(), "seal": torch.zeros(32, dtype=torch.uint8)}, path)


def other_name(path: Path) -> None:
    cache = FeatureCache(path.parent)
    key = replace(KEY, weights="other")
    cache.get_or_make(key, Maker(VALUES + 9))
    entry(cache, key).replace(path)


def other_rows(path: Path) -> None:
    cache = FeatureCache(path.parent)
    key = replace(KEY, rows=4)
    cache.get_or_make(key, Maker(torch.zeros(4, 2)))
    entry(cache, key).replace(path)


@pytest.mark.parametrize(
    "harm", [spoil_bit, cut_short, empty, zero_pages, other_tensors, other_dtype, other_name, other_rows]
)
def test_what_is_damaged_is_made_again(cache: FeatureCache, harm: Callable[[Path], None]) -> None:
    cache.get_or_make(KEY, Maker(VALUES))
    harm(entry(cache))
    make = Maker(VALUES)
    for _ in range(2):
        assert cache.get_or_make(KEY, make).tolist() == VALUES.tolist()
    assert make.calls == 1


def write_many_times(folder: Path, *, me: str, other: str) -> None:
    """Write and read the same entry, from the moment on when the other process is there too."""
    key = replace(KEY, rows=20_000)
    values = torch.arange(160_000, dtype=torch.float32).reshape(20_000, 8)
    cache, never = FeatureCache(folder), Maker(values)
    (folder / me).touch()
    while not (folder / other).exists():
        pass
    for _ in range(15):
        cache._write(key, values)
        assert torch.equal(cache.get_or_make(key, never), values)
    assert never.calls == 0


def test_two_processes_that_write_at_once_do_no_harm(tmp_path: Path) -> None:
    start = f"import runpy, pathlib; write = runpy.run_path({__file__!r})['write_many_times']\n"
    call = f"write(pathlib.Path({str(tmp_path)!r}), me='one', other='two')"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    child = subprocess.Popen([sys.executable, "-c", start + call], env=environment, stderr=subprocess.PIPE)
    while not (tmp_path / "one").exists() and child.poll() is None:
        time.sleep(0.01)
    if child.poll() is None:
        write_many_times(tmp_path, me="two", other="one")
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors.decode()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", "", ".safetensors"]


def test_what_a_killed_writer_left_is_cleared_away(cache: FeatureCache) -> None:
    cache.folder.mkdir()
    left, busy = (cache.folder / f".{KEY.digest}.safetensors.{digit * 16}.partial" for digit in "01")
    left.touch()
    with busy.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as a writer does for as long as it lives
        cache.get_or_make(KEY, Maker(VALUES))
        assert (left.exists(), busy.exists()) == (False, True)
    cache.get_or_make(replace(KEY, weights="other"), Maker(VALUES))
    assert not busy.exists()


def test_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_place_that_cannot_be_written_to_is_refused_before_anything_is_made(
    cache: FeatureCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Maker(VALUES)
    cache.folder.write_text("a file")
    with pytest.raises(OutputError, match=r"cannot keep features in .*: File exists; set ORTHOMERGE_CACHE"):
        cache.get_or_make(KEY, make)
    cache.folder.unlink()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OutputError, match=r"cannot keep features in .*: no permission"):
        cache.get_or_make(KEY, make)
    assert make.calls == 0


def test_a_full_disk_leaves_nothing_behind(cache: FeatureCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"No space left on device; make room, or set ORTHOMERGE_CACHE elsewhere"):
        cache.get_or_make(KEY, Maker(VALUES))
    assert list(cache.folder.iterdir()) == []


def test_as_many_rows_as_the_key_has(cache: FeatureCache) -> None:
    with pytest.raises(IncompatibleError, match="of 3 inputs were to be computed, got 2"):
        cache.get_or_make(KEY, Maker(VALUES[:2]))
    assert list(cache.folder.iterdir()) == []


def test_no_input_is_encoded_twice(cache: FeatureCache, bert: torch.nn.Module, texts: Examples, words: Any) -> None:
    calls: list[str] = []

    def features(pooling: str) -> torch.Tensor:
        def compute() -> torch.Tensor:
            calls.append(pooling)
            return extract(bert, BERT, pooling, texts, words, task="film", device="cpu").values

        return cache.get_or_make(FeatureKey.of(texts, words, weights="bert", family="bert", pooling=pooling), compute)

    first, again = features("mean"), features("mean")
    assert torch.equal(first, again)
    features("cls")
    assert calls == ["mean", "cls"]
