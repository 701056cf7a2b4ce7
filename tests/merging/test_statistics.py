"""Gram matrices and order statistics are exact, and the same bits for every size of block."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.merging.making import random_vectors, stacked, vectors_of

from orthomerge.merging import statistics
from orthomerge.merging.kinds import Site
from orthomerge.merging.statistics import grams, kth_largest, thresholds

floats = st.one_of(
    st.floats(width=32, allow_nan=False),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1.1754942e-38, 3.4028235e38, float("inf")]),
    st.integers(-3, 3).map(float),
)


@pytest.fixture(params=[0, 1 << 24], ids=["streamed", "in memory"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_IN_MEMORY", request.param)


def _oracle(values: torch.Tensor, k: int) -> float:
    if k <= 0:
        return float("inf")
    magnitudes = np.sort(np.abs(values.numpy()))[::-1]
    return float(magnitudes[k - 1]) if k <= len(magnitudes) else 0.0


@given(st.lists(floats, min_size=1, max_size=60), st.integers(0, 61), st.integers(1, 61))
@settings(deadline=None, max_examples=60)
def test_kth_largest_equals_sorting(numbers: list[float], k: int, step: int) -> None:
    first = torch.tensor(numbers)
    values = torch.stack([first, first.flip(0) * 0.5])
    before, ranks = values.clone(), (k, k // 2)
    for most in (0, statistics._IN_MEMORY):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(statistics, "_IN_MEMORY", most)
            found = kth_largest(lambda: torch.split(values, step, dim=1), ranks, rows=2, count=len(numbers))
        assert found == tuple(tuple(_oracle(row, rank) for row in values) for rank in ranks)
    assert torch.equal(values, before)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("kind", ["normal", "coarse", "constant", "mostly zero"])
@pytest.mark.parametrize("share", [0.0001, 0.2, 0.5, 0.99, 1.0])
def test_kth_largest_of_many(kind: str, share: float) -> None:
    values = torch.randn(100_003, generator=torch.Generator().manual_seed(4))
    if kind == "coarse":
        values = values.to(torch.bfloat16).float()
    elif kind == "constant":
        values = torch.full_like(values, -2.0)
    elif kind == "mostly zero":
        values = torch.nn.functional.hardshrink(values, 2.0)
    k = max(1, int(share * len(values)))
    assert kth_largest(lambda: [values.reshape(1, -1, 1)], (k,), rows=1, count=len(values)) == ((_oracle(values, k),),)


@pytest.mark.parametrize("factor", [1.0, 0.01, 100.0])
def test_a_sample_saves_a_pass_and_never_exactness(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass where the sample's quantile is near; two more where it is not, with the same result."""
    monkeypatch.setattr(statistics, "_IN_MEMORY", 0)
    values = torch.randn(100_003, generator=torch.Generator().manual_seed(4))
    site, passes = Site("w", values.shape, 0, ("a",)), 0

    def stream() -> list[torch.Tensor]:
        nonlocal passes
        passes += 1
        return [values[None]]

    for k in (1, 20_000, 99_000):
        passes, sample = 0, [(site, factor * values[None, start::9]) for start in range(3)]
        found = kth_largest(stream, (k,), rows=1, count=len(values), sample=sample)
        assert found == ((_oracle(values, k),),)
        if k == 20_000:  # extremes lie in thin tails, which a sample tells little of
            assert passes == (1 if factor == 1 else 3)


def test_a_sample_for_the_smallest_of_all_and_ranks_that_need_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank of the last element may exceed the sum of the sample's weights by rounding."""
    monkeypatch.setattr(statistics, "_IN_MEMORY", 0)
    values = torch.randn(1, 100_003, generator=torch.Generator().manual_seed(4))
    sample = [(Site("w", (100_003,), 0, ("a",)), values[:, start::7]) for start in range(7)]
    found = kth_largest(lambda: [values], (100_003,), rows=1, count=100_003, sample=sample)
    assert found == ((float(values.abs().min()),),)

    def stream() -> Iterator[torch.Tensor]:
        raise AssertionError

    inf = float("inf")
    assert kth_largest(stream, (0, 6, -1), rows=2, count=5) == ((inf, inf), (0.0, 0.0), (inf, inf))


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("tile", [7, 1 << 18])
@pytest.mark.parametrize("coarse", [False, True])
def test_thresholds_of_tensors_and_of_the_model(tile: int, coarse: bool) -> None:
    vectors = random_vectors(tile=tile, coarse=coarse)
    rows = torch.cat([deltas.reshape(3, deltas[0].numel()) for deltas in stacked(vectors).values()], 1)
    expected = tuple(_oracle(row, rows.shape[1] // 3) for row in rows)
    assert thresholds(vectors, lambda count: (count // 3,)) == (expected,)
    for key, deltas in stacked(vectors).items():
        count = deltas[0].numel()
        assert thresholds(vectors, lambda count: (count // 3, 1, 0, count + 1), keys=(key,)) == tuple(
            tuple(_oracle(row.flatten(), rank) for row in deltas) for rank in (count // 3, 1, 0, count + 1)
        )


def test_gram_matrices_by_hand() -> None:
    vectors = vectors_of([1, 2], [0, -3], base={"w": torch.tensor([2.0, 1.0])})
    assert grams(vectors)["w"].tolist() == [[5, 4, -3], [4, 5, -6], [-3, -6, 9]]


def test_gram_matrices_are_the_same_bits_for_every_size_of_block() -> None:
    generator = torch.Generator().manual_seed(0)
    base = {"m": torch.randn(300, 301, generator=generator), "v": torch.randn(99, generator=generator)}
    experts = [{key: torch.randn(t.shape, generator=generator) for key, t in base.items()} for _ in "ab"]
    whole, *others = (grams(vectors_of(*experts, base=base, tile=tile)) for tile in (1 << 20, 1 << 15, 10_007))
    for other in others:
        assert all(torch.equal(other[key], gram) for key, gram in whole.items())
    vectors = vectors_of(*experts, base=base)
    rows = torch.stack([base["m"], *(vector["m"] for vector in vectors.vectors.values())]).flatten(1).double()
    torch.testing.assert_close(whole["m"], rows @ rows.T)
