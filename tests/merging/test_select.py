"""The k-th largest magnitude is exact, whatever the sample said."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orthomerge.merging import select
from orthomerge.merging.select import kth_largest, kth_largest_streamed

floats = st.one_of(
    st.floats(width=32, allow_nan=False),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1.1754942e-38, 3.4028235e38, float("inf")]),
    st.integers(-3, 3).map(float),
)
rows = st.lists(floats, min_size=1, max_size=60)


def _oracle(values: torch.Tensor, k: int) -> float:
    if k <= 0:
        return float("inf")
    magnitudes = np.sort(np.abs(values.numpy()))[::-1]
    return float(magnitudes[k - 1]) if k <= len(magnitudes) else 0.0


def _cut(values: torch.Tensor, step: int) -> Iterator[torch.Tensor]:
    return iter(torch.split(values, step, dim=1))


@given(rows, st.integers(0, 61))
def test_in_memory(numbers: list[float], k: int) -> None:
    values = torch.tensor(numbers)
    before = values.clone()
    assert kth_largest(values, k) == _oracle(values, k)
    assert torch.equal(values, before)


@given(rows, st.integers(0, 61), st.integers(1, 61), st.one_of(st.none(), rows))
@settings(deadline=None, max_examples=60)
def test_streamed(numbers: list[float], k: int, step: int, sample: list[float] | None) -> None:
    first = torch.tensor(numbers)
    values = torch.stack([first, first.flip(0) * 0.5])
    guess = [] if sample is None else [torch.tensor([sample, sample])]
    found = kth_largest_streamed(lambda: _cut(values, step), (k, k // 2), sample=guess, count=values.shape[1])
    assert found == (_oracle(values[0], k), _oracle(values[1], k // 2))


def test_a_guess_as_narrow_as_one_number_is_still_checked() -> None:
    values = torch.arange(1.0, 101.0).reshape(1, -1)
    sample = [torch.full((1, 50), 7.0)]
    assert kth_largest_streamed(lambda: _cut(values, 9), (20,), sample=sample, count=100) == (81.0,)


@pytest.mark.parametrize("sample", [0.0, 1e-3, 1e3], ids=["zero", "too low", "too high"])
def test_a_wrong_sample_costs_passes_not_exactness(sample: float) -> None:
    values = torch.rand(1, 1000, generator=torch.Generator().manual_seed(1)) + 1
    passes = 0

    def stream() -> Iterator[torch.Tensor]:
        nonlocal passes
        passes += 1
        return _cut(values, 100)

    guess = [torch.full((1, 10), sample)]
    assert kth_largest_streamed(stream, (300,), sample=guess, count=1000) == (_oracle(values[0], 300),)
    assert passes > 1


def test_a_fair_sample_makes_it_one_pass() -> None:
    values = torch.randn(2, 200_000, generator=torch.Generator().manual_seed(2)) * 1e-3
    passes = 0

    def stream() -> Iterator[torch.Tensor]:
        nonlocal passes
        passes += 1
        return _cut(values, 4096)

    found = kth_largest_streamed(stream, (40_000, 100_000), sample=[values[:, ::13], values[:, ::7]], count=200_000)
    assert found == (_oracle(values[0], 40_000), _oracle(values[1], 100_000))
    assert passes == 1


def test_a_large_sample_is_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_SAMPLE", 100)
    values = torch.randn(1, 3000, generator=torch.Generator().manual_seed(3))
    found = kth_largest_streamed(lambda: _cut(values, 1000), (600,), sample=_cut(values, 30), count=3000)
    assert found == (_oracle(values[0], 600),)


def test_an_empty_sample_is_no_sample() -> None:
    values = torch.tensor([[3.0, -4.0]])
    empty = [torch.empty(1, 0)]
    assert kth_largest_streamed(lambda: _cut(values, 1), (1,), sample=empty, count=2) == (4.0,)


def test_nothing_is_read_for_ranks_that_need_no_look() -> None:
    def stream() -> Iterator[torch.Tensor]:
        raise AssertionError

    found = kth_largest_streamed(stream, (0, 6, -1), count=5)
    assert found == (float("inf"), 0.0, float("inf"))


@pytest.mark.parametrize("kind", ["normal", "coarse", "constant", "periodic", "mostly zero"])
@pytest.mark.parametrize("share", [0.0001, 0.2, 0.5, 0.99, 1.0])
def test_large_tensors_in_memory(kind: str, share: float) -> None:
    count = 100_003
    values = torch.randn(count, generator=torch.Generator().manual_seed(4))
    if kind == "coarse":
        values = values.to(torch.bfloat16).float()
    elif kind == "constant":
        values = torch.full_like(values, -2.0)
    elif kind == "periodic":  # what a sample of every n-th element cannot see
        values[:: count // (1 << 14)] = 9.0
    elif kind == "mostly zero":
        values = torch.nn.functional.hardshrink(values, 2.0)
    k = max(1, int(share * count))
    assert kth_largest(values.reshape(-1, 1), k) == _oracle(values, k)
