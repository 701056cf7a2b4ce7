"""What holds for every method that decomposes matrices, beside the contracts of `tests/checks`."""

from typing import Any

import pytest
import torch
from tests.merging.matrices import merge, normal

from orthomerge.core.errors import NumericalError, RecipeError
from orthomerge.merging.iso import IsoC, IsoCts
from orthomerge.merging.tsv_m import TsvM
from orthomerge.merging.wudi import Wudi

SPECTRAL = [TsvM, IsoC, IsoCts]


@pytest.mark.parametrize("cls", SPECTRAL)
@pytest.mark.parametrize("shape", [(4, 7), (4, 3, 2, 5, 5), (4, 1, 5, 6), (4,)])
def test_other_tensors_get_the_scaled_mean(cls: type[TsvM], shape: tuple[int, ...]) -> None:
    deltas = normal(*shape)
    torch.testing.assert_close(merge(cls(scale=2.0), deltas), 2 * deltas.mean(0))


@pytest.mark.parametrize("method", [TsvM(), IsoC(), IsoCts(), IsoCts(common=0.0)], ids=repr)
@pytest.mark.parametrize("shape", [(9, 4, 6), (9, 6, 4), (5, 1, 8), (5, 8, 1), (3, 1, 1)])
def test_more_experts_than_rank(method: TsvM, shape: tuple[int, ...]) -> None:
    merged = merge(method, normal(*shape))
    assert merged.shape == shape[1:]
    assert merged.isfinite().all()
    assert merged.any()


@pytest.mark.parametrize("method", [TsvM(), IsoC(), IsoCts(), IsoCts(common=0.4)], ids=repr)
def test_zero_low_rank_and_cancelling_experts(method: TsvM) -> None:
    for shape in ((20, 12), (8, 5)):
        assert torch.equal(merge(method, torch.zeros(3, *shape)), torch.zeros(shape))
    low = torch.stack([normal(20, 1, seed=t) @ normal(1, 30, seed=9 - t) for t in range(3)])
    assert merge(method, low).isfinite().all()
    tau = normal(8, 5)
    assert merge(method, torch.stack([tau, -tau])).isfinite().all()


@pytest.mark.parametrize("method", [TsvM(), IsoC(), IsoCts(), Wudi(steps=2)], ids=repr)
@pytest.mark.parametrize("shape", [(3, 12, 30), (3, 30, 12)])
def test_results_are_contiguous_and_repeat(method: TsvM, shape: tuple[int, ...]) -> None:
    deltas = normal(*shape)
    first, second = merge(method, deltas), merge(method, deltas)
    assert torch.equal(first, second)
    assert first.is_contiguous()


REFUSED: list[tuple[type[Any], dict[str, Any], str]] = [
    *((cls, {"scale": float("nan")}, "'scale' must be a finite number, got nan") for cls in (*SPECTRAL, Wudi)),
    (IsoCts, {"common": 1.2}, r"'common' must be in \[0, 1\], got 1.2"),
    (Wudi, {"lr": float("inf")}, "'lr' must be a finite number, got inf"),
    (Wudi, {"lr": 0.0}, "'lr' must be positive, got 0"),
    (Wudi, {"steps": -1}, "'steps' must be at least 0, got -1"),
    (Wudi, {"rest": "means"}, "'rest' must be base or mean, got 'means'; did you mean 'mean'"),
]


@pytest.mark.parametrize(("cls", "options", "message"), REFUSED)
def test_options_that_are_refused(cls: type[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        cls(**options)


@pytest.mark.parametrize("method", [TsvM(), IsoC(), IsoCts()], ids=repr)
def test_what_is_not_finite_is_refused(method: TsvM) -> None:
    with pytest.raises(NumericalError, match=r"'layer\.0\.weight' must be finite"):
        merge(method, torch.full((2, 3, 3), float("nan")))
