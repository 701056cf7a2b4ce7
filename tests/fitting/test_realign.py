"""Realign and its mixtures: stages that held-out inputs choose among, mixtures where inputs are few."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.fitting.making import shared_setting

from orthomerge.core.device import derive
from orthomerge.fitting.realign import Realign, mixtures, with_mixtures
from orthomerge.fitting.setting import Setting, encoded
from orthomerge.models.processing import PixelProcessor, Processor
from orthomerge.testing.settings import Kind, Words, make_setting

QUICK: dict[str, Any] = {"steps": 30, "look": 10, "batch": 8, "options": {"scale": 0.3}, "solver": "ridge"}


@pytest.fixture(scope="module")
def setting() -> Setting:
    return make_setting("bert", inputs=120)


def loss(setting: Setting, weights: torch.Tensor, heads: Any) -> float:
    """The mean divergence from the experts over all inputs."""
    setting.encoder.load(weights)
    losses = []
    for task in setting.tasks:
        teacher = setting.heads[task](setting.inputs.targets[task].features).log_softmax(1)
        student = heads[task](encoded(setting.encoder, setting.inputs, task)).log_softmax(1)
        losses.append((teacher.exp() * (teacher - student)).sum(1).mean())
    return float(torch.stack(losses).mean())


@pytest.mark.parametrize(
    ("gates", "read_by", "solver"),
    [("auto", "solved", "auto"), ("free", "expert", "ridge"), ("mask", "solved", "ridge"), ("mask", "expert", "ridge")],
)
def test_it_comes_nearer_to_the_experts(setting: Setting, gates: Any, read_by: Any, solver: str) -> None:
    made = Realign(gates=gates, read_by=read_by, **{**QUICK, "solver": solver}).fit(setting)
    merged = setting.merged("task_arithmetic", {"scale": 0.3})
    assert loss(setting, made.weights, made.classifiers) < loss(setting, merged, setting.heads)
    assert made.facts["kept"] in made.facts["held_out"]
    assert made.facts["held_out"][made.facts["kept"]] == min(made.facts["held_out"].values())


def test_what_held_out_inputs_do_not_like_is_not_kept(setting: Setting) -> None:
    """A rate at which training only destroys: the merge with solved heads stays, to the bit."""
    made = Realign(lr=1.0, gates="free", **QUICK).fit(setting)
    merged = setting.merged("task_arithmetic", {"scale": 0.3})
    assert made.facts["kept"] in ("solved", "merged")
    assert torch.equal(made.weights, merged)
    assert made.facts["best_step"] > 0, "heads were solved again for something that was trained"


def test_few_inputs_are_mixed_and_many_are_not(setting: Setting) -> None:
    few = replace(setting, inputs=setting.inputs.at(dict.fromkeys(setting.tasks, slice(6))))
    made = Realign(copies=50, **QUICK).fit(few)
    assert made.facts["mixtures"] == 3 * (50 - 6)
    assert Realign(copies=0, **QUICK).fit(setting).facts["mixtures"] == -sum(
        len(targets) // 10 for targets in setting.inputs.targets.values()
    )


@pytest.mark.parametrize("count", [1, 2])
def test_one_or_two_inputs_a_task(setting: Setting, count: int) -> None:
    few = replace(setting, inputs=setting.inputs.at(dict.fromkeys(setting.tasks, slice(count))))
    for options in (QUICK, {"copies": 0, **QUICK}):
        assert Realign(**options).fit(few).weights.isfinite().all()


@pytest.mark.parametrize("copies", [0, 40])
def test_heads_are_solved_on_the_inputs_that_count_most(copies: int) -> None:
    """Aligners know no weights: of every task its own inputs, and mixtures that began with one of these."""
    shared = shared_setting(inputs=10)
    _, _, solvable = Realign(copies=copies, hold_out=0.0)._inputs(shared)
    for task, targets in solvable.targets.items():
        assert set(targets.weights.tolist()) == {1.0}
        assert all(text.split()[0].startswith(task) for text in list(solvable.raw(task))[:10])
        assert len(targets) >= 10
    made = Realign(copies=copies, hold_out=0.0, **QUICK).fit(shared)
    assert loss(shared, made.weights, made.classifiers) < loss(
        shared, shared.merged("task_arithmetic", {}), shared.heads
    )


def test_images() -> None:
    made = Realign(copies=60, **QUICK).fit(make_setting("vit", inputs=20))
    assert made.facts["mixtures"] > 0
    assert made.weights.isfinite().all()


TEXTS = ["a b c d e f g h", "one two three", "x", "", "long " * 30]


def test_texts_are_mixed_each_as_often() -> None:
    mixed = mixtures(TEXTS, 200, seed=0)[0]
    assert len(mixed) == 200
    assert all(isinstance(text, str) for text in mixed)
    assert mixed == mixtures(TEXTS, 200, seed=0)[0]
    assert mixed != mixtures(TEXTS, 200, seed=1)[0]
    words = {word for text in TEXTS for word in text.split()}
    assert {word for text in mixed for word in text.split()} == words
    assert len(set(mixed)) > 80
    # Words of the first text stay in their order, and the second gives one run.
    joined = "a b c d e f g h one two three"
    pairs = [text for text in mixtures(["a b c d e f g h", "one two three"], 200, seed=2)[0] if "a" in text.split()[:1]]
    assert any("two" in text for text in pairs)
    for text in pairs:
        if "h" in text.split() and text.split().count("a") == 1:
            first = text.split()[: text.split().index("h") + 1]
            assert first == [word for word in joined.split() if word in first]
    distinct = [f"{n}" * 3 for n in range(7)]
    often = mixtures([f"{word} {word} {word} {word}" for word in distinct], 21, seed=0)[0]
    firsts = [text.split()[0] for text in often]
    assert sorted(firsts) == sorted(distinct * 3)
    assert mixtures(TEXTS, 0, seed=0) == ([], [])
    assert mixtures([], 5, seed=0) == ([], [])
    assert len(mixtures(["alone"], 5, seed=0)[0]) == 5


def test_pictures_are_mixed_or_moved_where_their_sizes_differ() -> None:
    random = np.random.default_rng(0)
    for shape in ((16, 16, 3), (16, 24), (5, 5)):
        own = list(random.integers(0, 256, (4, *shape), dtype=np.uint8))
        mixed = mixtures(own, 20, seed=0)[0]
        assert len(mixed) == 20
        assert {(each.shape, each.dtype) for each in mixed} == {(shape, np.dtype(np.uint8))}
        assert all(np.array_equal(a, b) for a, b in zip(mixed, mixtures(own, 20, seed=0)[0], strict=True))
        assert not all(np.array_equal(a, b) for a, b in zip(mixed, mixtures(own, 20, seed=1)[0], strict=True))
        assert len({each.tobytes() for each in mixed}) > 15
    flat = [np.full((16, 16, 3), 10, np.uint8), np.full((16, 16, 3), 250, np.uint8)]
    values = [np.unique(each).tolist() for each in mixtures(flat, 50, seed=0)[0]]
    assert all(len(value) == 1 and 10 <= value[0] <= 250 for value in values)
    assert len({value[0] for value in values}) > 10
    own = [np.arange(256, dtype=np.uint8).reshape(16, 16), np.zeros((8, 8), np.uint8)]
    for each in mixtures(own, 40, seed=0)[0]:
        assert each.shape in ((16, 16), (8, 8))
        if each.shape == (16, 16):
            down = int(each[8, 8]) // 16 - 8
            assert abs(down) <= 2
            assert each[8, 9] in (each[8, 8] + 1, each[8, 8])


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_the_expert_says_what_they_are(kind: Kind) -> None:
    setting = make_setting(kind, inputs=12)
    some = setting.inputs.at(dict.fromkeys(setting.tasks, slice(2, 9)))
    mixed = with_mixtures(setting, some, dict.fromkeys(setting.tasks, 13))
    assert len(mixed.pool) == 3 * (12 + 13)
    processor: Processor = Words() if kind == "bert" else PixelProcessor(16)
    for task in setting.tasks:
        targets = mixed.targets[task]
        assert len(targets) == 20
        raw = list(mixed.raw(task))
        assert all(np.array_equal(a, b) for a, b in zip(raw[:7], some.raw(task), strict=True))
        assert torch.equal(targets.rows[:7], some.targets[task].rows)
        assert torch.equal(targets.features[:7], some.targets[task].features)
        assert targets.weights.tolist() == [1.0] * 20
        setting.encoder.load(setting.tuned(task))
        with torch.no_grad():
            expected = setting.encoder.features(processor(raw))
        torch.testing.assert_close(targets.features, expected, rtol=1e-4, atol=1e-5)
    again = with_mixtures(setting, some, dict.fromkeys(setting.tasks, 13))
    assert torch.equal(again.targets["two"].features, mixed.targets["two"].features)
    enough = with_mixtures(setting, some, dict.fromkeys(setting.tasks, 0))
    assert [len(targets) for targets in enough.targets.values()] == [7, 7, 7]


def test_a_mixture_counts_as_much_as_the_input_that_it_began_with() -> None:
    setting = shared_setting("bert", (1.0, 0.25), inputs=4)
    own = list(setting.inputs.raw("three"))
    mixed = with_mixtures(setting, setting.inputs, {"two": 0, "three": 30, "five": 0})
    assert [len(targets) for targets in mixed.targets.values()] == [12, 42, 12]
    _, firsts = mixtures(own, 30, seed=derive(setting.seed, "mixtures", "three"))
    weights = [1.0 if own[first].startswith("three") else 0.25 for first in firsts]
    assert mixed.targets["three"].weights[12:].tolist() == weights
    assert {*weights} == {1.0, 0.25}
