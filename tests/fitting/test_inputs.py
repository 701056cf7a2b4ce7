"""Prepared inputs: the processor's own batches, by row over all tasks, whole or made batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.fitting.making import CLASSES, Kind, Words, make_setting

from orthomerge.data.inputs import Lazy
from orthomerge.data.pixels import PixelProcessor
from orthomerge.data.processing import Processor
from orthomerge.data.task import Examples
from orthomerge.fitting import inputs as module
from orthomerge.fitting.inputs import Inputs, encoded, prepare

COUNTS = {"one": 5, "two": 3, "three": 7}
CPU = torch.device("cpu")


def texts(count: int, seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    return [" ".join(f"w{word}" for word in random.integers(0, 60, length)) for length in random.integers(1, 13, count)]


def pictures(count: int, seed: int) -> list[Any]:
    return list(np.random.default_rng(seed).integers(0, 256, (count, 16, 16, 3), dtype=np.uint8))


def make(kind: Kind) -> tuple[Inputs, list[Any], Processor]:
    draw = texts if kind == "bert" else pictures
    items: dict[str, list[Any]] = {task: list(draw(count, seed)) for seed, (task, count) in enumerate(COUNTS.items())}
    processor: Processor = Words() if kind == "bert" else PixelProcessor(16)
    examples = {task: Examples(some, None, "train") for task, some in items.items()}
    teacher = {task: torch.full((count, 4), float(count), dtype=torch.float64) for task, count in COUNTS.items()}
    return prepare(examples, processor, teacher, device=CPU), [x for some in items.values() for x in some], processor


@pytest.mark.parametrize("kind", ["bert", "vit"])
@pytest.mark.parametrize("room", [None, 0])
def test_a_batch_is_the_processors(kind: Kind, room: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if room is not None:
        monkeypatch.setattr(module, "_room", lambda device: room)
    inputs, items, processor = make(kind)
    assert (inputs._tensors is None) == (room == 0)
    assert {task: rows.tolist() for task, rows in inputs.rows.items()} == {
        "one": [0, 1, 2, 3, 4],
        "two": [5, 6, 7],
        "three": [8, 9, 10, 11, 12, 13, 14],
    }
    for rows in ([3], [14, 0, 6], [1, 1, 13, 5, 2], list(range(15))):
        batch, expected = inputs.batch(torch.tensor(rows)), processor([items[row] for row in rows])
        assert batch.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(batch[name], tensor), name
            assert batch[name].dtype == tensor.dtype
    assert inputs.teacher[[0, 7, 14]].tolist() == [[5.0] * 4, [3.0] * 4, [7.0] * 4]
    assert inputs.teacher.dtype == torch.float32


@pytest.mark.parametrize("kind", ["bert", "vit"])
@pytest.mark.parametrize("room", [None, 0])
def test_some_of_the_inputs(kind: Kind, room: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if room is not None:
        monkeypatch.setattr(module, "_room", lambda device: room)
    inputs, items, processor = make(kind)
    # Other tasks first, or not at all: rows are rows of the whole.
    some = inputs.only({"three": torch.tensor([9, 12, 8]), "one": torch.tensor([4])})
    assert all(a is b for a, b in zip(some.raw("three"), (items[9], items[12], items[8]), strict=True))
    assert some.raw("one")[0] is items[4]
    parts = list(some.batches("three", 2))
    assert [rows.tolist() for rows, _ in parts] == [[9, 12], [8]]
    for rows, batch in parts:
        expected = processor([items[row] for row in rows.tolist()])
        assert all(torch.equal(batch[name], tensor) for name, tensor in expected.items())
    assert len(inputs.raw("two")) == 3
    assert some.processor is processor


def test_lazy_inputs_stay_lazy() -> None:
    opened: list[int] = []

    def load(key: int) -> Any:
        opened.append(key)
        return pictures(1, key)[0]

    keys: Sequence[int] = range(6)
    examples = {"one": Examples(Lazy(keys, load), None, "train")}
    inputs = prepare(examples, PixelProcessor(16), {"one": torch.zeros(6, 2)}, device=CPU)
    assert opened == list(keys)
    raw = inputs.only({"one": torch.tensor([5, 2])}).raw("one")
    assert opened == list(keys)
    assert np.array_equal(raw[1], pictures(1, 2)[0])


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_features_do_not_depend_on_the_size_of_batches(kind: Kind) -> None:
    setting = make_setting(kind, inputs=9)
    for task in CLASSES:
        setting.encoder.load(setting.tuned(task))
        for size in (1, 4, 256):
            found = encoded(setting.encoder, setting.inputs, task, size=size)
            torch.testing.assert_close(found, setting.inputs.teacher[setting.inputs.rows[task]], rtol=1e-4, atol=1e-5)
            assert not found.requires_grad
    close = encoded(setting.encoder, setting.inputs, "five", half=True)
    assert close.dtype == torch.float32
    assert not torch.equal(close, found)
    assert float((close - found).norm() / found.norm()) < 0.05
