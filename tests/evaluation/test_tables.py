"""Lines of a table, by hand."""

from __future__ import annotations

import pytest

from orthomerge.data.task import Access
from orthomerge.evaluation.records import Record
from orthomerge.evaluation.tables import accuracy_tables, lines


def record(task: str, value: float, *, seed: int = 0, access: Access = "inductive", **more: object) -> Record:
    given = {"method": "ties", "protocol": "knn", "metric": "accuracy", "shots": 5, **more}
    low, high = value - 0.03, value + 0.04
    return Record(task=task, value=value, low=low, high=high, examples=10, access=access, seed=seed, **given)  # type: ignore[arg-type]


SEEDS = [
    record("a", 0.5, seed=0),
    record("a", 0.7, seed=1),
    record("a", 0.9, seed=2),
    record("b", 0.3, seed=0),
    record("b", 0.5, seed=1),
    record("b", 0.1, seed=2),
]


def test_mean_spread_and_worst_seed() -> None:
    (line,) = lines(SEEDS)
    assert line.values == pytest.approx({"a": 70, "b": 30})
    assert line.mean == pytest.approx(50)
    # Means of the seeds: 40, 60, 50.
    assert line.worst_seed == pytest.approx(40)
    assert line.spread == pytest.approx(10)
    assert line.seeds == 3
    assert line.title == "knn, 5/class"


def test_the_interval_of_a_mean() -> None:
    (line,) = lines(SEEDS)
    # Two tasks, each 3 points down and 4 points up: sqrt(9 + 9) / 2 and sqrt(16 + 16) / 2
    assert (line.low, line.high) == pytest.approx((50 - 18**0.5 / 2, 50 + 32**0.5 / 2))
    (alone,) = lines([record("a", 0.5)])
    assert (alone.low, alone.high) == pytest.approx((47, 54))


def test_one_seed_has_no_spread() -> None:
    (line,) = lines([record("a", 0.25, shots=0.1), record("b", 0.75, shots=0.1)])
    assert (line.mean, line.worst_seed, line.spread, line.seeds) == (50, 50, None, 1)
    assert line.title == "knn, 10%"


def test_what_makes_another_line() -> None:
    given = [
        record("a", 0.1, access="transductive"),
        record("a", 0.2),
        record("a", 0.3, shots=None),
        record("a", 0.4, method="average"),
        record("a", 0.5, protocol="probe"),
        record("a", 0.6, metric="calibration"),
        record("a", 0.7, options={"l2": 1.0}),
        record("a", 0.8, options={"l2": 0.1}),
        record("a", 0.9, support="val"),
    ]
    assert [line.mean for line in lines(given)] == pytest.approx([10, 20, 30, 40, 50, 70, 80, 90])
    assert lines([]) == []


def test_markdown() -> None:
    other = record("a", 0.25, access="transductive", method="average", protocol="current", shots=None)
    tables = accuracy_tables([other, *SEEDS, record("b", 0.2, method="slerp")])
    assert "\n\n".join(table.markdown() for table in tables) == "\n".join(
        (
            "### Inductive: inputs from train or val, scored on test",
            "",
            "| method | protocol | a | b | mean | 95 % | sd | worst | seeds |",
            "|---|---|---:|---:|---:|---:|---:|---:|---:|",
            "| ties | knn, 5/class | 70.0 | 30.0 | 50.0 | 47.9-52.8 | 10.0 | 40.0 | 3 |",
            "| slerp | knn, 5/class |  | 20.0 | 20.0 | 17.0-24.0 |  | 20.0 | 1 |",
            "",
            "### Transductive: the test inputs themselves, as most papers do",
            "",
            "| method | protocol | a | b | mean | 95 % |",
            "|---|---|---:|---:|---:|---:|",
            "| average | current | 25.0 |  | 25.0 | 22.0-29.0 |",
        )
    )
