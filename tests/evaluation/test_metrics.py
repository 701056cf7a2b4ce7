"""Metrics and tests by hand or from the literature: exact binomials, intervals that cover, corrections, equivalence."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from orthomerge.core.errors import IncompatibleError
from orthomerge.evaluation import metrics
from orthomerge.evaluation.metrics import (
    Difference,
    bootstrap,
    counted,
    holm,
    mcnemar,
    mcnemar_hits,
    predict,
    tost,
    wilson,
)
from orthomerge.models.heads import SINGLE_LABEL, Head, Linear, head_kind, logits_of

Bools = NDArray[np.bool_]


@pytest.mark.parametrize(
    ("first", "second", "p"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),  # 2 * 1/2
        (0, 5, 2 / 32),
        (1, 5, 2 * (1 + 6) / 64),
        (2, 8, 2 * (1 + 10 + 45) / 1024),
        (8, 2, 2 * (1 + 10 + 45) / 1024),
        (3, 3, 1.0),  # 2 * (1 + 6 + 15 + 20) / 64 is more than 1
    ],
)
def test_mcnemar_by_hand(first: int, second: int, p: float) -> None:
    assert mcnemar(first, second) == p


def test_mcnemar_of_many_and_of_lists() -> None:
    # Normal with continuity correction: z = (|10100 - 9900| - 1) / sqrt(20000)
    z = 199 / math.sqrt(20_000)
    assert mcnemar(10_100, 9_900) == pytest.approx(math.erfc(z / math.sqrt(2)), rel=1e-3)
    assert mcnemar(20_000, 0) == 0.0
    # Only what differs counts.
    first = np.array([1, 1, 1, 1, 1, 0, 1, 0, 1], dtype=bool)
    second = np.array([0, 0, 0, 0, 0, 1, 1, 0, 1], dtype=bool)
    assert mcnemar_hits(first, second) == mcnemar(5, 1) == 14 / 64
    # Over seeds it goes by the majority. Under three: first ahead by 3, 1 and 1; second ahead by 1; level twice.
    first = np.array([[1, 1, 1, 0, 1, 0], [1, 0, 0, 0, 0, 1], [1, 0, 1, 0, 0, 0]], dtype=bool)
    second = np.array([[0, 0, 0, 0, 0, 1], [0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0]], dtype=bool)
    assert mcnemar_hits(first, second) == mcnemar(3, 1)


def draw(generator: np.random.Generator, *tasks: tuple[int, float]) -> tuple[dict[str, Bools], dict[str, Bools]]:
    """Hits of two methods on tasks of n inputs: 70 % both, 10 % + gain only the first, 10 % only the second."""
    kinds = {
        str(place): generator.choice(4, size=n, p=[0.7, 0.1 + gain, 0.1, 0.1 - gain])
        for place, (n, gain) in enumerate(tasks)
    }
    first, second = ({task: (kind == 0) | (kind == own) for task, kind in kinds.items()} for own in (1, 2))
    return first, second


def test_bootstrap_agrees_with_the_formula() -> None:
    first, second = draw(np.random.default_rng(0), (200, 0.03), (5000, 0.03))
    found, _ = bootstrap(first, second)
    gaps = [one.astype(int) - other for one, other in zip(first.values(), second.values(), strict=True)]
    estimate = np.mean([gap.mean() for gap in gaps])
    error = math.sqrt(sum(gap.var() / len(gap) for gap in gaps)) / 2
    assert found.estimate == pytest.approx(estimate)
    assert found.error == pytest.approx(error, rel=0.03)
    assert (found.low, found.high) == pytest.approx((estimate - 1.96 * error, estimate + 1.96 * error), abs=0.1 * error)
    assert found == bootstrap(first, second)[0]
    assert found != bootstrap(first, second, seed=1)[0]
    other, _ = bootstrap(second, first)
    assert other.estimate == -found.estimate


def test_bootstrap_by_task() -> None:
    first, second = draw(np.random.default_rng(0), (300, 0.05), (900, 0.0))
    whole, parts = bootstrap(first, second)
    assert list(parts) == ["0", "1"]
    for task, part in parts.items():
        alone, _ = bootstrap({task: first[task]}, {task: second[task]})
        assert part.estimate == alone.estimate == pytest.approx(first[task].mean() - second[task].mean())
        assert (part.low, part.high) == pytest.approx((alone.low, alone.high), abs=0.005)
        assert part.error == pytest.approx(alone.error, rel=0.05)
    assert whole.error == pytest.approx(math.hypot(*(part.error for part in parts.values())) / 2, rel=0.03)


def test_bootstrap_covers() -> None:
    generator = np.random.default_rng(1)
    covered = 0
    for seed in range(200):
        found, _ = bootstrap(*draw(generator, (60, 0.05), (150, 0.05)), resamples=1000, seed=seed)
        covered += found.low <= 0.05 <= found.high
    assert 180 <= covered <= 199  # of 190 expected


def test_bootstrap_draws_items_as_a_naive_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(2)
    first, second = generator.random((5, 80)) < 0.8, generator.random((5, 80)) < 0.6
    monkeypatch.setattr(metrics, "_MOST", 1000)  # several blocks
    found, _ = bootstrap({"t": first}, {"t": second})
    gap = first.astype(int) - second
    drawn = (np.ix_(generator.integers(5, size=5), generator.integers(80, size=80)) for _ in range(4000))
    naive = np.array([gap[places].mean() for places in drawn])
    assert found.estimate == pytest.approx(gap.mean())
    assert found.error == pytest.approx(naive.std(), rel=0.06)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(naive, [0.025, 0.975])), abs=0.012)


def test_seeds_that_disagree_widen_the_interval() -> None:
    base = np.zeros((6, 400), dtype=bool)
    steady, shaky = base.copy(), base.copy()
    steady[:, ::2] = True
    shaky[::2] = True
    calm, wild = (bootstrap({"t": hits}, {"t": base[0]})[0] for hits in (steady, shaky))
    assert calm.estimate == wild.estimate == 0.5
    assert wild.high - wild.low > 5 * (calm.high - calm.low)


def test_methods_that_never_differ_and_methods_that_do() -> None:
    hits = np.array([True, False, True, True])
    found, _ = bootstrap({"t": hits}, {"t": hits})
    assert (found.estimate, found.low, found.high, found.p) == (0, 0, 0, 1)
    assert found.error == pytest.approx(1 / 6)  # sqrt(0.5 + 0.5) / (4 + 2)
    better = np.arange(200) < 180
    assert bootstrap({"t": better}, {"t": np.arange(200) < 140})[0].p == pytest.approx(2 / 10_001)


def test_holm_by_hand() -> None:
    # 4 * 0.005, 3 * 0.01, 2 * 0.03, then 0.04, which may not fall below 0.06; in the order given
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert found == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})
    assert list(found) == ["a", "b", "c", "d"]
    assert holm({"a": 0.9, "b": 0.6}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}
    assert holm({("a", "x"): 0.02, ("a", "y"): 0.01}) == {("a", "x"): 0.02, ("a", "y"): 0.02}


@pytest.mark.parametrize(
    ("estimate", "error", "comparable"),
    [
        (0.0, 0.002, True),  # z = 2.5 both ways
        (0.0, 0.004, False),  # no difference seen, but too little data to say there is none
        (0.0045, 0.001, False),  # z = 0.5 on one side
        (0.02, 0.001, False),
        (-0.02, 0.001, False),
    ],
)
def test_comparable_needs_both_tests(estimate: float, error: float, comparable: bool) -> None:
    assert tost(Difference(estimate, 0, 0, error, 1), margin=0.005).comparable is comparable


def test_tost_by_hand() -> None:
    # (0.001 + 0.005) / 0.003 = 2 and (0.001 - 0.005) / 0.003 = -4/3 standard errors
    found = tost(Difference(0.001, 0, 0, 0.003, 1), margin=0.005)
    assert (found.p_below, found.p_above) == pytest.approx((0.0227501, 0.0912112), abs=1e-6)
    assert not found.comparable


def test_choices_take_the_first_of_equals() -> None:
    choices = head_kind(SINGLE_LABEL).choices
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-math.inf, -5.0, -math.inf]])
    assert choices(logits).tolist() == [1, 0, 1]
    assert choices(torch.zeros(0, 3)).tolist() == []
    for shape in ((3,), (3, 0), (1, 2, 3)):
        with pytest.raises(IncompatibleError, match=r"logits must be \[n, classes\], got"):
            choices(torch.zeros(shape))


def test_no_input_is_lost_between_blocks_or_by_a_classifier() -> None:
    head = Head(Linear(torch.tensor([[1.0], [-1.0]])), ("plus", "minus"))
    values = torch.arange(-10_000, 10_000).float()[:, None]
    predicted = predict(head, values)
    assert len(predicted) == 20_000
    assert int(predicted.sum()) == 10_000
    assert torch.equal(logits_of(head, values), head(values))

    class Short:
        labels = ("a", "b")

        def __call__(self, features: torch.Tensor) -> torch.Tensor:
            return torch.zeros(len(features) - 1, 2)

    with pytest.raises(IncompatibleError, match=r"must give logits \(5, 2\) for 5 inputs, got \(4, 2\)"):
        predict(Short(), torch.zeros(5, 3))


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [
        # Newcombe 1998, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0),
    ],
)
def test_wilson(right: int, total: int, low: float, high: float) -> None:
    assert wilson(right, total) == pytest.approx((low, high), abs=6e-5)


def test_an_accuracy_with_its_interval() -> None:
    predicted, labels = torch.tensor([0, 1, 2, 1]), torch.tensor([0, 1, 2, 0])
    assert metrics.hits(predicted, labels).tolist() == [True, True, True, False]
    assert counted(predicted, labels) == metrics.Score(0.75, *wilson(3, 4), examples=4)
    for one, other in (((3,), (4,)), ((0,), (0,)), ((2, 1), (2, 1))):
        with pytest.raises(IncompatibleError, match="predictions and labels must be two lists of the same length"):
            counted(torch.zeros(one), torch.zeros(other))
