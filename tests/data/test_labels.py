"""Labels are matched by name, never by luck."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.making import refused, write

from orthomerge.core.errors import IncompatibleError, RecipeError
from orthomerge.data.labels import match_labels
from orthomerge.data.reading import read_task
from orthomerge.data.task import Examples, Task


def task(*labels: str) -> Task:
    count = len(labels)
    train = Examples([f"text {n}" for n in range(count)], np.arange(count), "train")
    return Task("toy", labels, "text", {"train": train, "test": Examples(["unlabelled"], None, "test")})


def names(matched: Task) -> list[str]:
    labels = matched["train"].labels
    assert labels is not None
    return [matched.labels[label] for label in labels]


def test_permuted_by_name() -> None:
    matched = match_labels(task("a", "b", "c"), ("c", "a", "b"))
    assert (matched.labels, names(matched)) == (("c", "a", "b"), ["a", "b", "c"])
    assert matched["test"].labels is None
    assert list(matched["train"].inputs) == ["text 0", "text 1", "text 2"]


def test_spellings() -> None:
    matched = match_labels(task("card_arrival", "Lost Card", "PIN"), ("pin", "lost_card", "Card arrival"))
    assert matched.labels == ("pin", "lost_card", "Card arrival")
    assert names(matched) == ["Card arrival", "lost_card", "pin"]
    assert names(match_labels(task("a b", "A_b"), ("A_b", "a b"))) == ["a b", "A_b"]  # exact names come first


def test_experts_without_names_take_the_order_as_it_is() -> None:
    unchanged = task("b", "a")
    assert match_labels(unchanged, ("LABEL_0", "LABEL_1")) is unchanged


@pytest.mark.parametrize(
    ("own", "expert", "message"),
    [
        (("A B", "ab"), ("ab", "A_b"), r"only the task has 'A B'; only the expert has 'A_b'"),
        (("b", "a"), ("LABEL_0", "LABEL_1", "LABEL_2"), r"has 3 labels without names, but the task has 2: 'b', 'a'"),
        (("b", "a"), ("LABEL_1", "LABEL_0"), r"has 'b', 'a'; only the expert has 'LABEL_0', 'LABEL_1'"),
        (tuple("axyzw"), tuple("acb"), r"has 'x', 'y', 'z' and 1 more; only the expert has 'b', 'c'; give the task"),
        (("a",), ("a", "b"), r"not those of its expert: only the expert has 'b'; give"),
    ],
)
def test_labels_that_differ(own: tuple[str, ...], expert: tuple[str, ...], message: str) -> None:
    with pytest.raises(IncompatibleError, match=message):
        match_labels(task(*own), expert)


def labelled(folder: Path, *keys: int | str, kind: str = "jsonl") -> Path:
    return write(folder / f"toy.{kind}", [{"text": f"t{n}", "label": key} for n, key in enumerate(keys)])


@pytest.mark.parametrize(
    ("keys", "kind", "expected"),
    [
        (range(11), "csv", tuple(map(str, range(11)))),
        (map(str, range(11)), "jsonl", tuple(map(str, range(11)))),
        ((1, 2, 3), "jsonl", ("1", "2", "3")),
        (("02", "10", "1x"), "jsonl", ("02", "10", "1x")),
    ],
)
def test_the_order_of_labels(keys: Any, kind: str, expected: tuple[str, ...], tmp_path: Path) -> None:
    assert read_task(labelled(tmp_path, *keys, kind=kind)).labels == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ((0, 1, 3), r"has labels from 0 to 3 but no 2; a class without examples must be named"),
        ((2, 3), r"has labels from 2 to 3 but no 0"),
        ((-1, 1), r"toy.jsonl line 1: label -1 is negative; ids must run from 0 or from 1"),
        ((0, "a"), r"must have either ids or names as labels, got 'a' \(.*line 2\) and 0 \(.*line 1\)"),
        ((0, 1, "1"), r"labels 1 and '1' are both called '1'|labels '1' and 1 are both called '1'"),
    ],
)
def test_unsound_labels(keys: tuple[int | str, ...], message: str, tmp_path: Path) -> None:
    refused(labelled(tmp_path, *keys), message)


def test_wanted_labels(tmp_path: Path) -> None:
    assert names(read_task(labelled(tmp_path, "b", "a"), labels=("b", "a"))) == ["b", "a"]
    assert names(read_task(labelled(tmp_path, "B x", "a"), labels=("a", "b_x"))) == ["b_x", "a"]
    assert names(read_task(labelled(tmp_path, 1, 0, kind="csv"), labels=("no", "yes"))) == ["yes", "no"]
    assert names(read_task(labelled(tmp_path, 1, 2), labels=("2", "1"))) == ["1", "2"]


@pytest.mark.parametrize(
    ("keys", "wanted", "message"),
    [
        (("b", "aa"), ("aaa", "b"), r"toy.jsonl line 2: label 'aa' is not one of the 2 labels; did you mean 'aaa'"),
        ((1, 2), ("no", "yes"), r"toy.jsonl line 2: label '2' is not one of the 2 labels; known: no, yes"),
        (("a", "b"), ("a", "b", "c"), r"the train split has no examples of 'c'"),
    ],
)
def test_labels_that_are_not_wanted(
    keys: tuple[int | str, ...], wanted: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    refused(labelled(tmp_path, *keys), message, labels=wanted)


def test_wanted_labels_must_be_distinct(tmp_path: Path) -> None:
    refused(labelled(tmp_path, "a"), "'labels' must be distinct names, got 'a', 'a'", RecipeError, labels=("a", "a"))
    refused(labelled(tmp_path, "a"), "'labels' must be distinct names, got none", RecipeError, labels=())
