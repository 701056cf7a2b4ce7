"""TIES with each tensor trimmed on its own."""

from collections.abc import Callable

import pytest
import torch

from orthomerge.merging.ties import Ties
from orthomerge.merging.ties_per_tensor import TiesPerTensor
from orthomerge.merging.vectors import TaskVectors

Merge = Callable[..., dict[str, torch.Tensor]]
Make = Callable[..., TaskVectors]


def test_by_hand(vectors_of: Make, merged: Merge) -> None:
    vectors = vectors_of({"large": [5, -4], "small": [1, 2]}, {"large": [1, -8], "small": [-1, 4]})
    result = merged(TiesPerTensor(0.5), vectors)
    assert result["large"].tolist() == [5, -8]
    assert result["small"].tolist() == [0, 3]


def test_with_one_tensor_it_is_the_papers(vectors_of: Make, merged: Merge) -> None:
    experts = torch.randn(3, 400, generator=torch.Generator().manual_seed(0))
    vectors = vectors_of(*experts)
    assert torch.equal(merged(TiesPerTensor(), vectors)["w"], merged(Ties(), vectors)["w"])


def test_no_look_is_taken_at_density_one(vectors_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = vectors_of([1.0], [2.0])
    monkeypatch.setattr(TaskVectors, "block", lambda *_: pytest.fail("was read"))
    TiesPerTensor(1.0).survey(vectors)
