"""Tasks keep inputs, labels and splits together; choices are balanced, nested, and the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthomerge.core.errors import RecipeError
from orthomerge.data.task import Examples, Task, few_shot, share, stratified

LABELS = np.array([0] * 5 + [1] * 9 + [2] * 3)


def test_take_keeps_inputs_with_their_labels() -> None:
    taken = Examples(["a", "b", "c"], np.array([0, 1, 2]), "val").take([2, 0, 2])
    assert taken.labels is not None
    assert (list(taken.inputs), taken.labels.tolist(), taken.split) == (["c", "a", "c"], [2, 0, 2], "val")
    assert taken.unlabelled().labels is taken.unlabelled().take([1]).labels is None


def test_digests_are_of_inputs_in_their_order() -> None:
    def digest(*inputs: object, label: int = 0) -> str:
        return Examples(inputs, np.full(len(inputs), label), "train").digest()

    assert digest("a", "b") == digest("a", "b", label=1)
    images = [np.zeros((2, 3), np.uint8), np.zeros((3, 2), np.uint8)]
    inputs = [("a", "b"), ("b", "a"), ("ab",), ("ab", ""), (images[0],), (images[1],), tuple(images)]
    assert len({digest(*given) for given in inputs}) == len(inputs)


def test_what_is_wrong() -> None:
    with pytest.raises(RecipeError, match="the train split has 2 inputs but 1 labels"):
        Examples(["a", "b"], np.array([0]), "train")
    train = Examples(["a", "b"], np.array([0, 2]), "train")
    with pytest.raises(RecipeError, match=r"labels of the train split of 'toy' must be 0 to 1"):
        Task("toy", ("x", "y"), "text", {"train": train})
    for labels in ((), ("x", "x")):
        with pytest.raises(RecipeError, match="task 'toy' must have distinct labels"):
            Task("toy", labels, "text", {})
    with pytest.raises(RecipeError, match=r"task 'toy' has no 'tset' split; known: train"):
        Task("toy", ("x", "y", "z"), "text", {"train": train})["tset"]


def test_few_shot_is_balanced_and_sorted() -> None:
    places = few_shot(LABELS, 3, seed=1)
    assert np.bincount(LABELS[places]).tolist() == [3, 3, 3]
    assert places.tolist() == sorted(set(places.tolist()))
    assert places.dtype == np.int64
    assert np.bincount(LABELS[few_shot(LABELS, 6, seed=0, allow_fewer=True)]).tolist() == [5, 6, 3]


def test_the_same_seed_gives_the_same_places_whatever_the_global_state() -> None:
    first = [few_shot(LABELS, 2, seed=7).tolist(), share(50, 0.2, seed=7).tolist()]
    np.random.seed(3)
    assert [few_shot(LABELS, 2, seed=7).tolist(), share(50, 0.2, seed=7).tolist()] == first
    assert any(few_shot(LABELS, 2, seed=seed).tolist() != first[0] for seed in range(3))


def test_larger_choices_contain_smaller_ones() -> None:
    assert set(few_shot(LABELS, 1, seed=5)) < set(few_shot(LABELS, 3, seed=5))
    assert set(share(40, 0.1, seed=5)) < set(share(40, 0.5, seed=5))
    assert [len(share(1000, 0.05, seed=0)), len(share(3, 0.01, seed=0))] == [50, 1]
    assert share(4, 1.0, seed=0).tolist() == [0, 1, 2, 3]


def test_refused() -> None:
    with pytest.raises(RecipeError, match=r"class 2 has 3 examples, fewer than 4 shots \(1 of 3 classes .* at most 3"):
        few_shot(LABELS, 4, seed=0)
    with pytest.raises(RecipeError, match="at least 1, got 0"):
        few_shot(LABELS, 0, seed=0)
    with pytest.raises(RecipeError, match="must not be negative, got -1"):
        few_shot(LABELS, 1, seed=-1)
    for ratio, count in ((0.0, 5), (1.5, 5), (0.5, 0)):
        with pytest.raises(RecipeError, match=f"above 0 and at most 1 .*, got {ratio} of {count}"):
            share(count, ratio, seed=0)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(0, 60), st.integers(0, 3))
def test_stratified_leaves_every_class_and_keeps_shares(values: list[int], count: int, seed: int) -> None:
    labels = np.array(values, dtype=np.int64)
    count = min(count, len(labels))
    places = stratified(labels, count, seed=seed)
    assert len(places) <= count
    assert len(set(places.tolist())) == len(places)
    sizes, taken = np.bincount(labels), np.bincount(labels[places], minlength=int(labels.max()) + 1)
    assert all(some < size for some, size in zip(taken, sizes, strict=True) if size)
    assert all(some <= count * size / len(labels) + 1 for some, size in zip(taken, sizes, strict=True))


def test_stratified_by_hand() -> None:
    labels = np.array([0] * 60 + [1] * 30 + [2] * 10)
    assert np.bincount(labels[stratified(labels, 10, seed=0)]).tolist() == [6, 3, 1]
    assert np.bincount(labels[stratified(labels, 12, seed=0)]).tolist() == [7, 4, 1]  # 7.2, 3.6, 1.2
