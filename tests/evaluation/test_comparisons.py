"""Comparisons from a run folder alone: folders written by hand, without any model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from orthomerge.core.errors import CheckpointError, IncompatibleError, RecipeError
from orthomerge.evaluation.comparisons import comparison_tables
from orthomerge.evaluation.metrics import UNSCORED, bootstrap, holm, mcnemar
from orthomerge.evaluation.records import Record, read_records, write_records
from orthomerge.evaluation.scores import compare_run, read_comparisons

N = 400
CURRENT: dict[str, Any] = {"protocol": "current", "access": "data-free"}
KNN: dict[str, Any] = {"protocol": "knn", "access": "inductive", "support": "train", "shots": 5}
Refused = (CheckpointError, IncompatibleError, RecipeError)


def right(start: int, stop: int, *, n: int = N) -> NDArray[np.bool_]:
    """Hits on the inputs from `start` to `stop`."""
    hits = np.zeros(n, dtype=bool)
    hits[start:stop] = True
    return hits


def add(
    folder: Path, method: str, hits: Mapping[str, Any], *, unscored: Sequence[int] = (), first: int = 0, **way: Any
) -> None:
    """Write the records and predictions of one method; several seeds are several rows of hits."""
    path = folder / "records.jsonl"
    records = read_records(path) if path.exists() else []
    (folder / "predictions").mkdir(parents=True, exist_ok=True)
    for task, given in hits.items():
        for seed, row in enumerate(np.atleast_2d(np.asarray(given))):
            truth = np.arange(len(row)) % 3 + first
            predicted = np.where(row, truth, truth + 1)
            predicted[list(unscored)] = UNSCORED
            name = f"predictions/{len(records)}.npz"
            np.savez_compressed(folder / name, predicted=predicted, truth=truth)
            count = int((predicted != UNSCORED).sum())
            value = float((predicted == truth).sum() / count)
            said = {"seed": seed, "predictions": name, **(way or CURRENT)}
            records.append(Record(task, method, metric="accuracy", value=value, low=0, high=1, examples=count, **said))
    write_records(path, records)


def three(folder: Path) -> None:
    """On `a` and `b` of 400 inputs each: `high` has 300 right, `level` the same but for three, `low` far fewer."""
    add(folder, "low", {"a": right(0, 200), "b": right(0, 290)})
    add(folder, "high", {"a": right(0, 300), "b": right(0, 300)})
    add(folder, "level", {"a": right(1, 301), "b": right(0, 299)})


def pair(folder: Path, one: Any = None, other: Any = None, **way: Any) -> Path:
    """Two methods on a task `a`; unless given, one has 100 right of 400, the other 200."""
    add(folder, "one", {"a": right(0, 100) if one is None else one}, **way)
    add(folder, "other", {"a": right(0, 200) if other is None else other}, **way)
    return folder


def test_by_hand(tmp_path: Path) -> None:
    three(tmp_path)
    low, level = compare_run(tmp_path)
    assert {item.reference for item in (low, level)} == {"high"}  # the best mean
    assert (low.method, level.method) == ("low", "level")
    # McNemar: on `a` only the reference is right on 100 inputs, on `b` on 10; `level` is ahead and behind once on `a`.
    tests = {("low", "a"): mcnemar(0, 100), ("low", "b"): mcnemar(0, 10), ("level", "a"): 1.0, ("level", "b"): 1.0}
    corrected = holm(tests)
    for item in (low, level):
        for task, part in item.tasks.items():
            assert (part.p, part.adjusted) == (tests[item.method, task], corrected[item.method, task])
            assert part.examples == N
            assert part.low <= part.estimate <= part.high
    assert (low.better, low.worse) == ((), ("a", "b"))
    assert (level.better, level.worse) == ((), ())
    assert low.tasks["a"].estimate == -0.25
    assert low.difference.estimate == pytest.approx(-(0.25 + 0.025) / 2)
    mine, theirs = ({"a": right(0, stop), "b": right(0, other)} for stop, other in ((200, 290), (300, 300)))
    assert low.difference == bootstrap(mine, theirs)[0]
    assert low.adjusted == pytest.approx(2 * low.difference.p)  # the smaller of two
    assert (low.verdict, low.comparable) == ("worse", False)
    assert (level.verdict, level.comparable) == ("comparable", True)
    assert (low.seeds, low.equivalence.margin) == (1, 0.01)
    (_, level) = compare_run(tmp_path, margin=0.001)
    assert (level.verdict, level.comparable) == ("undecided", False)  # no difference shown, and not shown to be none


@pytest.mark.parametrize(
    ("n", "ranges", "options", "verdict"),
    [
        (20, ((0, 15), (1, 15)), {}, "undecided"),
        (20, ((0, 15), (1, 15)), {"margin": 0.5}, "comparable"),
        (4000, ((0, 2000), (0, 1985)), {}, "worse, but comparable"),
        (4000, ((0, 2000), (0, 1985)), {"against": "other"}, "better, but comparable"),
    ],
)
def test_verdicts(n: int, ranges: Any, options: dict[str, Any], verdict: str, tmp_path: Path) -> None:
    (found,) = compare_run(pair(tmp_path, *(right(*ends, n=n) for ends in ranges)), **options)
    assert found.verdict == verdict
    assert (found.better == ("a",)) == (verdict == "better, but comparable")


def test_the_reference_can_be_named(tmp_path: Path) -> None:
    three(tmp_path)
    add(tmp_path, "high", {"a": right(0, 300)}, **KNN)
    add(tmp_path, "level", {"a": right(0, 301)}, **KNN)
    found = compare_run(tmp_path, against="low")
    # Where it was not scored, the best is the reference.
    assert [(item.method, item.reference) for item in found] == [("high", "low"), ("level", "low"), ("high", "level")]
    assert found[0].better == ("a", "b")
    with pytest.raises(RecipeError, match=r"no records of 'hihg' to compare with; did you mean 'high'\?"):
        compare_run(tmp_path, against="hihg")


def test_only_what_was_read_in_the_same_way(tmp_path: Path) -> None:
    ways = (CURRENT, KNN, {**KNN, "shots": 10}, {**KNN, "support": "val"}, {**KNN, "options": {"l2": 1}})
    for number, way in enumerate(ways):
        pair(tmp_path, right(0, 100 + number), right(0, 200 + number), **way)
    add(tmp_path, "alone", {"a": right(0, 300)}, protocol="probe", access="inductive", support="train")
    found = compare_run(tmp_path)
    assert len(found) == len({item.way for item in found}) == 5
    assert {(item.method, item.reference) for item in found} == {("one", "other")}
    assert all(item.difference.estimate == pytest.approx(-0.25) for item in found)


def test_seeds_are_paired(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    first, second = generator.random((3, N)) < 0.8, generator.random((5, N)) < 0.7
    (found,) = compare_run(pair(tmp_path, list(first), list(second), **KNN))
    assert found.seeds == 3  # those that both have
    assert found.difference == bootstrap({"a": second[:3]}, {"a": first})[0]
    gaps = second[:3].sum(0, dtype=int) - first.sum(0, dtype=int)
    assert found.tasks["a"].p == mcnemar(int((gaps > 0).sum()), int((gaps < 0).sum()))


def test_inputs_that_were_support_do_not_count(tmp_path: Path) -> None:
    way = {**KNN, "access": "transductive", "support": "test"}
    add(tmp_path, "one", {"a": right(0, 300), "b": right(0, 300)}, unscored=range(100), **way)
    add(tmp_path, "other", {"a": right(0, 200), "b": right(0, 300)}, unscored=range(90, 110), **way)
    (found,) = compare_run(tmp_path)
    assert found.tasks["a"].examples == N - 110
    assert abs(found.tasks["a"].estimate) == pytest.approx(100 / (N - 110))
    add(tmp_path / "none", "one", {"a": right(0, 300)}, unscored=range(200), **way)
    add(tmp_path / "none", "other", {"a": right(0, 300)}, unscored=range(200, 400), **way)
    assert compare_run(tmp_path / "none") == []


def test_methods_scored_on_fewer_tasks(tmp_path: Path) -> None:
    three(tmp_path)
    add(tmp_path, "partial", {"b": right(0, 400)})
    add(tmp_path, "elsewhere", {"c": right(0, 400)})
    found = {item.method: item for item in compare_run(tmp_path)}
    assert {item.reference for item in found.values()} == {"high"}  # a mean over fewer tasks is no better mean
    assert set(found) == {"low", "level", "partial"}
    assert list(found["partial"].tasks) == ["b"]
    assert found["partial"].difference.estimate == pytest.approx(0.25)
    notes = [table.note.partition(". ")[0] for table in comparison_tables(found.values())]
    assert notes == ["Points, paired by input, on a, b", "Points, paired by input, on b"]


def test_joint_label_spaces(tmp_path: Path) -> None:
    way: dict[str, Any] = {"protocol": "joint", "access": "data-free"}
    for method, stop in (("one", 200), ("other", 100)):
        add(tmp_path, method, {"a": right(0, stop)}, **way)
        add(tmp_path, method, {"b": right(0, stop)}, first=3, **way)
    add(tmp_path, "smaller", {"b": right(0, 300)}, first=0, **way)  # one task less: another space
    (found,) = compare_run(tmp_path)
    assert (found.method, found.reference, list(found.tasks)) == ("other", "one", ["a", "b"])
    assert found.difference.estimate == pytest.approx(-0.25)


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    three(tmp_path)
    found = compare_run(pair(tmp_path, **KNN, options={"l2": 1.5}))
    path = tmp_path / "comparisons.json"
    path.write_text(json.dumps([asdict(item) for item in found]))
    assert read_comparisons(path) == found
    with pytest.raises(CheckpointError, match=r"cannot read .*gone"):
        read_comparisons(tmp_path / "gone")
    for text, message in (
        ("[", "comparisons.json is not JSON"),
        ("{}", "must be a list of comparisons, got dict"),
        ('[{"method": "one"}]', "item 1: 'reference' is missing"),
    ):
        path.write_text(text)
        with pytest.raises(Refused, match=message):
            read_comparisons(path)


def test_tables(tmp_path: Path) -> None:
    three(tmp_path)
    current, knn = comparison_tables(compare_run(pair(tmp_path, **KNN)))
    assert current.title == "Against high: current (data-free)"
    assert knn.title == "Against other: knn, 5/class (inductive)"
    low, level = current.texts
    assert low[:3] == ("low", "worse", "-13.8")
    assert low[4:] == ("<0.001", "0 of 2", "2 of 2")
    assert level[:3] == ("level", "comparable", "-0.1")
    assert level[5:] == ("0 of 2", "0 of 2")
    assert "Comparable: the difference is less than 1 either way" in current.note


def test_records_that_do_not_fit(tmp_path: Path) -> None:
    records = read_records(pair(tmp_path) / "records.jsonl")
    first = records[0]
    cases: list[tuple[list[Record], str]] = [
        ([replace(first, value=0.5)], r"0.npz holds 100 hits of 400 inputs, but .* has 0.5000 of 400"),
        ([replace(first, predictions=None)], "names no predictions of 'one' on 'a'; evaluate again"),
        ([replace(first, predictions="predictions/gone.npz")], r"cannot read .*gone.npz: No such file"),
        ([first, first], "two records of 'one' on 'a' under current have seed 0"),
    ]
    for changed, message in cases:
        write_records(tmp_path / "records.jsonl", [*changed, *records[1:]])
        with pytest.raises(Refused, match=message):
            compare_run(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"0.npz is damaged: .*; evaluate again"),
        (b"PK\x03\x04 and no more", r"0.npz is damaged: .*; evaluate again"),
        (b"plain text", r"0.npz is damaged: .*; evaluate again"),
        ({"truth": np.zeros(N - 1)}, r"0.npz is damaged: \(400,\) predictions, \(399,\) labels"),
        ({}, r"0.npz must have an array 'truth', got none; evaluate again with this version"),
        ({"truth": np.zeros(N)}, "'one' and 'other' were not scored on the same inputs of 'a'"),
    ],
)
def test_predictions_that_are_damaged(tmp_path: Path, content: Any, message: str) -> None:
    path = pair(tmp_path) / "predictions/0.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.savez_compressed(path, predicted=np.where(np.arange(N) < 100, 0, 1), **content)
    with pytest.raises(Refused, match=message):
        compare_run(tmp_path)
