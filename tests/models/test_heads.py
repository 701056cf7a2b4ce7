"""Heads: small numbers worked out by hand, and rows that follow their labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orthomerge.core.errors import IncompatibleError
from orthomerge.models.heads import Head, Linear

W = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
B = torch.tensor([10.0, 20.0, 30.0])
X = torch.tensor([[3.0, 4.0]])
LABELS = ("a", "b", "c")


def test_a_linear_head() -> None:
    head = Head(Linear(W, B), LABELS)
    assert head(X).tolist() == [[13.0, 28.0, 37.0]]
    assert Head(Linear(W), LABELS)(X).tolist() == [[3.0, 8.0, 7.0]]
    assert (head.width, list(head.tensors())) == (2, ["weight", "bias"])
    assert list(Head(Linear(W), LABELS).tensors()) == ["weight"]


def test_a_head_with_a_hidden_layer() -> None:
    hidden = Linear(torch.tensor([[1.0, 0.0, 0.0], [0.0, -1.0, 0.0]]), torch.tensor([0.5, 0.0]))
    head = Head(Linear(W, B), LABELS, hidden, "relu")
    # hidden: [2 + 0.5, -3] -> relu [2.5, 0]
    assert head(torch.tensor([[2.0, 3.0, 9.0]])).tolist() == [[12.5, 20.0, 32.5]]
    assert (head.width, list(head.tensors())) == (3, ["weight", "bias", "hidden.weight", "hidden.bias"])
    for activation in ("tanh", "gelu"):
        expected = getattr(torch, activation, torch.nn.functional.gelu)(hidden(torch.ones(1, 3))) @ W.T + B
        assert torch.allclose(Head(Linear(W, B), LABELS, hidden, activation)(torch.ones(1, 3)), expected)


def test_other_tensors_of_the_same_head() -> None:
    hidden = Linear(torch.ones(2, 3))
    head = Head(Linear(W, B), LABELS, hidden, "relu", normalise=True)
    twice = head.with_tensors({name: 2 * tensor for name, tensor in head.tensors().items()})
    assert (twice.labels, twice.activation, twice.normalise) == (LABELS, "relu", True)
    assert twice.hidden is not None
    assert (twice.output.weight.tolist(), twice.hidden.weight.tolist()) == ((2 * W).tolist(), [[2.0] * 3] * 2)
    assert twice.hidden.bias is None
    assert Head(Linear(W), LABELS).with_tensors({"weight": 3 * W}).output.bias is None


def test_normalised_features() -> None:
    head = Head(Linear(W), LABELS, normalise=True)
    assert torch.allclose(head(X), torch.tensor([[0.6, 1.6, 1.4]]))
    assert torch.equal(head(7 * X), head(X))


def test_rows_are_matched_by_name() -> None:
    head = Head(Linear(W, B), LABELS)
    turned = head.reordered(("c", "a", "b"))
    assert turned.labels == ("c", "a", "b")
    assert turned(X).tolist() == [[37.0, 13.0, 28.0]]
    assert turned.reordered(LABELS)(X).tolist() == head(X).tolist()
    assert Head(Linear(W), LABELS).reordered(("b", "c", "a")).output.bias is None
    hidden = Linear(torch.eye(2))
    both = Head(Linear(W), LABELS, hidden, "tanh", normalise=True).reordered(("b", "c", "a"))
    assert (both.hidden, both.activation, both.normalise) == (hidden, "tanh", True)


def test_labels_that_do_not_fit() -> None:
    with pytest.raises(IncompatibleError, match=r"3 rows but 2 labels \('a', 'b'\); give one label per row"):
        Head(Linear(W), ("a", "b"))
    with pytest.raises(IncompatibleError, match="label sets differ: 'c', 'd'"):
        Head(Linear(W), LABELS).reordered(("a", "b", "d"))
    with pytest.raises(IncompatibleError, match="label sets differ: 'c'"):
        Head(Linear(W), LABELS).reordered(("a", "b"))


def test_a_hidden_layer_and_its_activation_go_together() -> None:
    more: Any
    for more in ({"hidden": Linear(torch.eye(2))}, {"activation": "tanh"}):
        with pytest.raises(IncompatibleError, match="hidden layer and its activation go together: give both or nei"):
            Head(Linear(W), LABELS, **more)


def test_a_head_in_half_precision_reads_features_in_float32() -> None:
    weight = torch.tensor([[1.0, 2.0], [0.5, -1.0]]).bfloat16()
    head = Head(Linear(weight, torch.ones(2).bfloat16()), ("a", "b"))
    values = torch.tensor([[1.0009765625, 3.0]])  # more digits than bfloat16 has
    torch.testing.assert_close(head(values), torch.tensor([[8.0009765625, -1.49951171875]]), rtol=0, atol=0)
