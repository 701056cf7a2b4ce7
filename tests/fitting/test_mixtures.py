"""Mixtures of inputs: of two of the task's own, the same by the same seed, with what the expert says of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.fitting.making import shared_setting

from orthomerge.core.device import derive
from orthomerge.fitting.mixtures import mixtures, with_mixtures
from orthomerge.models.processing import PixelProcessor, Processor
from orthomerge.testing.settings import Kind, Words, make_setting

TEXTS = ["a b c d e f g h", "one two three", "x", "", "long " * 30]


def test_texts() -> None:
    found = mixtures(TEXTS, 200, seed=0)[0]
    assert len(found) == 200
    assert all(isinstance(text, str) for text in found)
    assert found == mixtures(TEXTS, 200, seed=0)[0]
    assert found != mixtures(TEXTS, 200, seed=1)[0]
    words = {word for text in TEXTS for word in text.split()}
    assert {word for text in found for word in text.split()} == words
    assert len(set(found)) > 80
    # Words of the first text stay in their order, and the second gives one run.
    joined = "a b c d e f g h one two three"
    pairs = [text for text in mixtures(["a b c d e f g h", "one two three"], 200, seed=2)[0] if "a" in text.split()[:1]]
    assert any("two" in text for text in pairs)
    for text in pairs:
        if "h" in text.split() and text.split().count("a") == 1:
            first = text.split()[: text.split().index("h") + 1]
            assert first == [word for word in joined.split() if word in first]


def test_every_input_is_mixed_as_often() -> None:
    distinct = [f"{n}" * 3 for n in range(7)]
    found = mixtures([f"{word} {word} {word} {word}" for word in distinct], 21, seed=0)[0]
    firsts = [text.split()[0] for text in found]
    assert sorted(firsts) == sorted(distinct * 3)


def test_pictures() -> None:
    random = np.random.default_rng(0)
    for shape in ((16, 16, 3), (16, 24), (5, 5)):
        own = list(random.integers(0, 256, (4, *shape), dtype=np.uint8))
        found = mixtures(own, 20, seed=0)[0]
        assert len(found) == 20
        assert {(each.shape, each.dtype) for each in found} == {(shape, np.dtype(np.uint8))}
        assert all(np.array_equal(a, b) for a, b in zip(found, mixtures(own, 20, seed=0)[0], strict=True))
        assert not all(np.array_equal(a, b) for a, b in zip(found, mixtures(own, 20, seed=1)[0], strict=True))
        assert len({each.tobytes() for each in found}) > 15
    flat = [np.full((16, 16, 3), 10, np.uint8), np.full((16, 16, 3), 250, np.uint8)]
    values = [np.unique(each).tolist() for each in mixtures(flat, 50, seed=0)[0]]
    assert all(len(value) == 1 and 10 <= value[0] <= 250 for value in values)
    assert len({value[0] for value in values}) > 10


def test_pictures_of_other_sizes_are_moved_only() -> None:
    own = [np.arange(256, dtype=np.uint8).reshape(16, 16), np.zeros((8, 8), np.uint8)]
    for each in mixtures(own, 40, seed=0)[0]:
        assert each.shape in ((16, 16), (8, 8))
        if each.shape == (16, 16):
            down = int(each[8, 8]) // 16 - 8
            assert abs(down) <= 2
            assert each[8, 9] in (each[8, 8] + 1, each[8, 8])


def test_nothing_to_mix() -> None:
    assert mixtures(TEXTS, 0, seed=0) == ([], [])
    assert mixtures([], 5, seed=0) == ([], [])
    assert len(mixtures(["alone"], 5, seed=0)[0]) == 5


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_the_expert_says_what_they_are(kind: Kind) -> None:
    setting = make_setting(kind, inputs=12)
    some = setting.inputs.at(dict.fromkeys(setting.tasks, slice(2, 9)))
    found = with_mixtures(setting, some, dict.fromkeys(setting.tasks, 13))
    assert len(found.pool) == 3 * (12 + 13)
    processor: Processor = Words() if kind == "bert" else PixelProcessor(16)
    for task in setting.tasks:
        targets = found.targets[task]
        assert len(targets) == 20
        raw = list(found.raw(task))
        assert all(np.array_equal(a, b) for a, b in zip(raw[:7], some.raw(task), strict=True))
        assert torch.equal(targets.rows[:7], some.targets[task].rows)
        assert torch.equal(targets.features[:7], some.targets[task].features)
        assert targets.weights.tolist() == [1.0] * 20
        setting.encoder.load(setting.tuned(task))
        with torch.no_grad():
            expected = setting.encoder.features(processor(raw))
        torch.testing.assert_close(targets.features, expected, rtol=1e-4, atol=1e-5)
    again = with_mixtures(setting, some, dict.fromkeys(setting.tasks, 13))
    assert torch.equal(again.targets["two"].features, found.targets["two"].features)
    enough = with_mixtures(setting, some, dict.fromkeys(setting.tasks, 0))
    assert [len(targets) for targets in enough.targets.values()] == [7, 7, 7]


def test_a_mixture_counts_as_much_as_the_input_that_it_began_with() -> None:
    setting = shared_setting("bert", (1.0, 0.25), inputs=4)
    own = list(setting.inputs.raw("three"))
    found = with_mixtures(setting, setting.inputs, {"two": 0, "three": 30, "five": 0})
    assert [len(targets) for targets in found.targets.values()] == [12, 42, 12]
    _, firsts = mixtures(own, 30, seed=derive(setting.seed, "mixtures", "three"))
    weights = [1.0 if own[first].startswith("three") else 0.25 for first in firsts]
    assert found.targets["three"].weights[12:].tolist() == weights
    assert {*weights} == {1.0, 0.25}
