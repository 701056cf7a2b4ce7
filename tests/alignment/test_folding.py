"""Folding is exact: a head with a map in it says of x what the old one says of the mapped x."""

from __future__ import annotations

import pytest
import torch
from tests.alignment.planted import doubles, exact, same_head

from orthomerge.alignment.folding import centred_rows, first_map, folded, logits_from, read_by, with_first_map
from orthomerge.core.errors import IncompatibleError, NumericalError
from orthomerge.testing.toys import HEADS, head_of, linear_head


def test_by_hand() -> None:
    # W = [[1, 2], [3, 4]], A swaps both features and doubles the first: W A = [[4, 1], [8, 3]]; W c + b = (5, 11) + 1.
    head = linear_head(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(2))
    A = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    found = folded(head, A, torch.tensor([1.0, 2.0]), task="toy").output
    assert found.weight.tolist() == [[4, 1], [8, 3]]
    assert found.bias is not None
    assert found.bias.tolist() == [6, 12]
    assert head.output.weight.tolist() == [[1, 2], [3, 4]]  # the old head stays


def test_what_a_head_reads() -> None:
    f = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert read_by(linear_head(torch.eye(2)), f).tolist() == f.tolist()
    unit = read_by(linear_head(torch.eye(2), normalise=True), f)
    assert unit.dtype == torch.float64
    assert unit.tolist() == [[0.6, 0.8], [0, 0]]  # what has no direction has none


@pytest.mark.parametrize("kind", HEADS)
def test_logits_are_those_of_the_head(kind: str) -> None:
    head, f = exact(head_of(kind)), doubles(9, 6)
    torch.testing.assert_close(logits_from(head, read_by(head, f)), head(f), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", HEADS)
def test_folding_is_exact(kind: str) -> None:
    """For any A, not only orthogonal ones, and behind a head that normalises too."""
    head, f, A = exact(head_of(kind)), doubles(9, 6), doubles(6, 6, seed=7)
    shift = doubles(6, seed=8) if first_map(head).bias is not None else None
    x = read_by(head, f)
    mapped = x @ A.T if shift is None else x @ A.T + shift
    found = folded(head, A, shift, task="toy")
    torch.testing.assert_close(found(f), logits_from(head, mapped), rtol=0, atol=1e-12)
    assert {name: tensor.shape for name, tensor in found.tensors().items()} == {
        name: tensor.shape for name, tensor in head.tensors().items()
    }


@pytest.mark.parametrize("kind", HEADS)
def test_folding_twice_is_folding_the_product(kind: str) -> None:
    head, A, B = exact(head_of(kind)), doubles(6, 6, seed=7), doubles(6, 6, seed=8)
    twice = folded(folded(head, A, task="toy"), B, task="toy")
    once = folded(head, A @ B, task="toy")
    for name, tensor in once.tensors().items():
        torch.testing.assert_close(twice.tensors()[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", HEADS)
def test_the_identity_changes_no_bit(kind: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        head = head_of(kind).to(dtype)
        shift = torch.zeros(6) if first_map(head).bias is not None else None
        assert same_head(folded(head, torch.eye(6), shift, task="toy"), head)


def test_softmax_does_not_see_what_is_common_to_all_classes() -> None:
    head = linear_head(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    assert centred_rows(head).tolist() == [[-1, -2], [1, 2]]
    hidden = head_of("hidden")
    assert hidden.hidden is not None
    assert torch.equal(centred_rows(hidden), hidden.hidden.weight.double())  # but an activation does


def test_mistakes() -> None:
    head = head_of("no bias")
    with pytest.raises(IncompatibleError, match="head of 'toy' has no bias that could take up a shift"):
        folded(head, torch.eye(6), torch.ones(6), task="toy")
    with pytest.raises(IncompatibleError, match="aligned head of 'toy' would not have the shape of the expert's"):
        with_first_map(head, torch.ones(3, 5), None, task="toy")
    with pytest.raises(IncompatibleError, match="would not have the shape"):
        with_first_map(head, head.output.weight, torch.ones(3), task="toy")
    with pytest.raises(NumericalError, match="aligned head of 'toy' is not finite; give more inputs, or another"):
        folded(head, torch.full((6, 6), float("nan")), task="toy")
    half = linear_head(head.output.weight.half(), torch.ones(3).half())
    with pytest.raises(NumericalError, match="is not finite"):  # it was, until it became half precision
        folded(half, torch.eye(6), torch.full((6,), 1e6), task="toy")
