"""Half a product is the whole one: symmetric to the last bit, and the same at every width."""

from __future__ import annotations

import pytest
import torch
from tests.alignment.planted import doubles

from orthomerge.alignment.gram import forms, gram


@pytest.mark.parametrize("shape", [(0, 3), (5, 0), (7, 4), (30, 191), (20, 192), (40, 193), (250, 300)])
def test_a_gram_matrix(shape: tuple[int, int]) -> None:
    """Narrow, or wide enough to be made in strips; rows of any layout."""
    X = doubles(*shape)
    for rows in (X, X.T.contiguous().T, doubles(3 * shape[0], shape[1])[::3]):
        torch.testing.assert_close(gram(rows), rows.T @ rows, rtol=0, atol=1e-12)
    found = gram(doubles(*shape, seed=1))
    torch.testing.assert_close(found, found.T, rtol=0, atol=1e-12)


@pytest.mark.parametrize("d", [1, 5, 96, 97, 250])
def test_forms_of_columns(d: int) -> None:
    """Of a matrix that is not symmetric, and of which nothing is changed."""
    X, V = doubles(d, d), doubles(d, 7, seed=1)
    before = X.clone()
    torch.testing.assert_close(forms(X, V), (V * (X @ V)).sum(0), rtol=1e-12, atol=1e-10)
    assert torch.equal(X, before)


def test_forms_by_hand() -> None:
    """(1, 2) [[1, 10], [100, 1000]] (1, 2)^T = 1 + 20 + 200 + 4000."""
    X = torch.tensor([[1.0, 10.0], [100.0, 1000.0]], dtype=torch.float64)
    assert forms(X, torch.tensor([[1.0], [2.0]], dtype=torch.float64)).tolist() == [4221]
