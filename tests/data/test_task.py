"""Tasks keep inputs, labels and splits together."""

from __future__ import annotations

import numpy as np
import pytest

from orthomerge.core.errors import RecipeError
from orthomerge.data.task import Examples, Task


def test_take_keeps_inputs_with_their_labels() -> None:
    taken = Examples(["a", "b", "c"], np.array([0, 1, 2]), "val").take([2, 0, 2])
    assert list(taken.inputs) == ["c", "a", "c"]
    assert taken.labels is not None
    assert taken.labels.tolist() == [2, 0, 2]
    assert taken.split == "val"
    assert taken.unlabelled().labels is None
    assert taken.unlabelled().take([1]).labels is None


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
    with pytest.raises(RecipeError, match=r"the train split of 'toy' has labels outside 0..1"):
        Task("toy", ("x", "y"), "text", {"train": train})
    for labels in ((), ("x", "x")):
        with pytest.raises(RecipeError, match="task 'toy' must have distinct labels"):
            Task("toy", labels, "text", {})
    with pytest.raises(RecipeError, match=r"task 'toy' has no 'tset' split; known: train"):
        Task("toy", ("x", "y", "z"), "text", {"train": train})["tset"]
