"""Metrics against values worked out by hand or printed in the literature."""

from __future__ import annotations

import math

import pytest
import torch

from orthomerge.core.errors import IncompatibleError, NumericalError
from orthomerge.evaluation.metrics import Score, counted, hits, predict, wilson
from orthomerge.models.heads import SINGLE_LABEL, Head, Linear, head_kind, logits_of

KIND = head_kind(SINGLE_LABEL)


def test_choices_take_the_first_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-math.inf, -5.0, -math.inf]])
    assert KIND.choices(logits).tolist() == [1, 0, 1]
    assert KIND.choices(torch.zeros(0, 3)).tolist() == []
    for shape in ((3,), (3, 0), (1, 2, 3)):
        with pytest.raises(IncompatibleError, match=r"logits must be \[n, classes\], got"):
            KIND.choices(torch.zeros(shape))
    with pytest.raises(NumericalError, match="1 of 2 rows of logits hold NaN"):
        KIND.choices(torch.tensor([[1.0, 0.0], [math.nan, 0.0]]))


def test_no_input_is_lost_between_blocks() -> None:
    head = Head(Linear(torch.tensor([[1.0], [-1.0]])), ("plus", "minus"))
    values = torch.arange(-10_000, 10_000).float()[:, None]
    predicted = predict(head, values)
    assert len(predicted) == 20_000
    assert int(predicted.sum()) == 10_000
    assert torch.equal(logits_of(head, values), head(values))


class _Short:
    labels = ("a", "b")

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(features) - 1, 2)


def test_a_classifier_that_loses_inputs() -> None:
    with pytest.raises(IncompatibleError, match=r"must give logits \(5, 2\) for 5 inputs, got \(4, 2\)"):
        predict(_Short(), torch.zeros(5, 3))


@pytest.mark.parametrize(("one", "other"), [((3,), (4,)), ((0,), (0,)), ((2, 1), (2, 1))])
def test_lists_that_do_not_match(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    with pytest.raises(IncompatibleError, match="predictions and labels must be two lists of the same length"):
        counted(torch.zeros(one), torch.zeros(other))


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
    assert hits(predicted, labels).tolist() == [True, True, True, False]
    assert counted(predicted, labels) == Score(0.75, *wilson(3, 4), examples=4)
