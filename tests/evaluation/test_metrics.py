"""Metrics against values worked out by hand or printed in the literature."""

from __future__ import annotations

import math

import pytest
import torch

from orthomerge.core.errors import IncompatibleError, NumericalError, RecipeError
from orthomerge.evaluation.metrics import (
    UNSCORED,
    Score,
    accuracy,
    counted,
    expected_calibration_error,
    hits,
    mean_accuracy,
    normalised_accuracy,
    predict,
    predictions,
    scored,
    wilson,
    worst_task,
)
from orthomerge.models.heads import Head, Linear, logits_of


def test_predictions_take_the_first_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-math.inf, -5.0, -math.inf]])
    assert predictions(logits).tolist() == [1, 0, 1]


def test_predictions_of_nothing() -> None:
    assert predictions(torch.zeros(0, 3)).tolist() == []


@pytest.mark.parametrize("shape", [(3,), (3, 0), (1, 2, 3)])
def test_logits_of_the_wrong_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(IncompatibleError, match=r"logits must be \[n, classes\], got"):
        predictions(torch.zeros(shape))


def test_nan_predicts_nothing() -> None:
    with pytest.raises(NumericalError, match="1 of 2 rows of logits hold NaN"):
        predictions(torch.tensor([[1.0, 0.0], [math.nan, 0.0]]))


def test_no_input_is_lost_between_blocks() -> None:
    head = Head(Linear(torch.tensor([[1.0], [-1.0]])), ("plus", "minus"))
    values = torch.arange(-10_000, 10_000).float()[:, None]
    predicted = predict(head, values)
    assert len(predicted) == 20_000
    assert int(predicted.sum()) == 10_000
    assert torch.equal(logits_of(head, values), head(values))


class _Loses:
    labels = ("a", "b")

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(features) - 1, 2)


def test_a_classifier_that_loses_inputs() -> None:
    with pytest.raises(IncompatibleError, match=r"must give logits \(5, 2\) for 5 inputs, got \(4, 2\)"):
        predict(_Loses(), torch.zeros(5, 3))


def test_accuracy() -> None:
    predicted, labels = torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, 1, 0])
    assert hits(predicted, labels).tolist() == [True, True, False, True]
    assert accuracy(predicted, labels) == 0.75


def test_support_is_not_scored() -> None:
    predicted, labels = torch.tensor([0, UNSCORED, 2]), torch.tensor([0, 1, 1])
    kept, truth = scored(predicted, labels)
    assert (kept.tolist(), truth.tolist()) == ([0, 2], [0, 1])
    with pytest.raises(IncompatibleError, match="1 of 3 inputs were support and are unscored; take `scored` first"):
        accuracy(predicted, labels)


@pytest.mark.parametrize(("one", "other"), [((3,), (4,)), ((0,), (0,)), ((2, 1), (2, 1))])
def test_lists_that_do_not_match(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    with pytest.raises(IncompatibleError, match="predictions and labels must be two lists of the same length"):
        accuracy(torch.zeros(one), torch.zeros(other))


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
    found = counted(torch.tensor([0, 1, 2, 1]), torch.tensor([0, 1, 2, 0]))
    assert found == Score(0.75, *wilson(3, 4), examples=4)
    with pytest.raises(IncompatibleError, match="1 of 2 inputs were support and are unscored"):
        counted(torch.tensor([0, UNSCORED]), torch.tensor([0, 1]))


def test_wilson_takes_a_level() -> None:
    # z = 1.644854: (0.5 + z^2/20 -+ z sqrt(0.025 + z^2/400)) / (1 + z^2/10) of 5 in 10
    assert wilson(5, 10, confidence=0.9) == pytest.approx((0.26927, 0.73073), abs=1e-5)


@pytest.mark.parametrize(("right", "total"), [(3, 2), (-1, 2), (0, 0)])
def test_wilson_of_nonsense(right: int, total: int) -> None:
    with pytest.raises(RecipeError, match=rf"hits must be in 0\.\.{total} .* got {right} of {total}"):
        wilson(right, total)


def test_wilson_at_an_impossible_level() -> None:
    with pytest.raises(RecipeError, match=r"'confidence' must be in \(0, 1\), got 1"):
        wilson(1, 2, confidence=1)


def test_calibration_error_by_hand() -> None:
    # Confidences 0.9, 0.9, 0.6, 0.8 (log-odds); right, wrong, right, wrong. In two bins (1/2, 1]: all four in one,
    # |2 - 3.2| / 4 = 0.3. In five: (0.4, 0.6] gap |1 - 0.6|, (0.6, 0.8] gap 0.8, (0.8, 1] gap |1 - 1.8|; 2 / 4 = 0.5.
    share = torch.tensor([0.9, 0.9, 0.6, 0.8], dtype=torch.float64)
    logits = torch.stack([(share / (1 - share)).log(), torch.zeros(4)], 1)
    labels = torch.tensor([0, 1, 0, 1])
    assert expected_calibration_error(logits, labels, bins=2) == pytest.approx(0.3)
    assert expected_calibration_error(logits - 1e-6, labels, bins=5) == pytest.approx(0.5)


def test_calibration_of_the_sure_and_right() -> None:
    assert expected_calibration_error(torch.tensor([[100.0, 0.0]]), torch.tensor([0])) == pytest.approx(0)


def test_calibration_without_bins() -> None:
    with pytest.raises(RecipeError, match="'bins' must be at least 1, got 0"):
        expected_calibration_error(torch.zeros(1, 2), torch.zeros(1), bins=0)


def test_over_tasks() -> None:
    accuracies, experts = {"a": 0.4, "b": 0.9, "c": 0.4}, {"a": 0.8, "b": 0.9, "c": 0.5}
    assert mean_accuracy(accuracies) == pytest.approx(1.7 / 3)
    # (1/2 + 1 + 4/5) / 3; the ratio of means would be 0.7727
    assert normalised_accuracy(accuracies, experts) == pytest.approx(2.3 / 3)
    assert worst_task(accuracies) == ("a", 0.4)


def test_over_no_tasks() -> None:
    with pytest.raises(RecipeError, match="needs at least one task, got none"):
        mean_accuracy({})
    with pytest.raises(RecipeError, match="the worst of no tasks"):
        worst_task({})


def test_normalised_by_other_tasks() -> None:
    with pytest.raises(IncompatibleError, match="accuracies and experts differ in tasks: 'b'"):
        normalised_accuracy({"a": 1.0}, {"a": 1.0, "b": 1.0})


def test_normalised_by_an_expert_that_knows_nothing() -> None:
    with pytest.raises(NumericalError, match="the expert of 'a' has accuracy 0"):
        normalised_accuracy({"a": 1.0}, {"a": 0.0})
