"""Singular and polar factors: orthonormal, nearest, unique, and stubborn when a solver gives up."""

from typing import NoReturn

import pytest
import torch

from orthomerge.core.errors import NumericalError
from orthomerge.merging.polar import is_table, polar, svd


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def identity(n: int) -> torch.Tensor:
    return torch.eye(n, dtype=torch.float64)


def orthonormal(X: torch.Tensor) -> torch.Tensor:
    """Some matrix with orthonormal columns or rows, near X if X is nearly one."""
    m, k = X.shape
    factors = torch.linalg.qr(X if m >= k else X.T)
    Q: torch.Tensor = factors.Q * factors.R.diagonal().sign()
    return Q if m >= k else Q.T


SHAPES = [(12, 12), (13, 12), (90, 7), (7, 90), (1, 5), (5, 1), (1, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_svd_is_thin_orthonormal_and_exact(shape: tuple[int, int]) -> None:
    X = normal(*shape)
    U, s, Vh = svd(X, key="w")
    r = min(shape)
    assert U.shape == (shape[0], r)
    assert Vh.shape == (r, shape[1])
    torch.testing.assert_close(s, torch.linalg.svdvals(X))
    torch.testing.assert_close(U.T @ U, identity(r), atol=1e-9, rtol=0)
    torch.testing.assert_close(Vh @ Vh.T, identity(r), atol=1e-9, rtol=0)
    torch.testing.assert_close((U * s) @ Vh, X)


def test_svd_by_hand() -> None:
    # The swap of two axes, one of them stretched: e_0 -> 3 e_1, e_1 -> -2 e_0.
    U, s, Vh = svd(torch.tensor([[0.0, -2.0], [3.0, 0.0], [0.0, 0.0]]), key="w")
    torch.testing.assert_close(s, torch.tensor([3.0, 2.0], dtype=torch.float64))
    torch.testing.assert_close(Vh, torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64))
    torch.testing.assert_close(U, torch.tensor([[0.0, -1.0], [1.0, 0.0], [0.0, 0.0]], dtype=torch.float64))


@pytest.mark.parametrize("shape", [(40, 9), (9, 40)])
def test_signs_do_not_depend_on_the_sign_of_the_matrix(shape: tuple[int, int]) -> None:
    X = normal(*shape)
    (U, _, Vh), (U_minus, _, Vh_minus) = svd(X, key="w"), svd(-X, key="w")
    if shape[0] > shape[1]:
        torch.testing.assert_close(Vh, Vh_minus)
        torch.testing.assert_close(U, -U_minus)
        assert (Vh.gather(1, Vh.abs().argmax(1, keepdim=True)) > 0).all()
    else:
        torch.testing.assert_close(U, U_minus)
        torch.testing.assert_close(Vh, -Vh_minus)


@pytest.mark.parametrize("shape", [(60, 20), (20, 60), (20, 20)])
def test_rounding_has_no_directions(shape: tuple[int, int]) -> None:
    low = (normal(shape[0], 3) @ normal(3, shape[1], seed=1)).float()  # rank 3, and float32 noise on top
    U, s, Vh = svd(low, key="w")
    assert (U.shape[1], len(s), len(Vh)) == (3, 3, 3)
    torch.testing.assert_close(((U * s) @ Vh).float(), low)


def test_top_and_floor_leave_out_the_smallest() -> None:
    X = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0]))
    assert svd(X, key="w", top=2)[1].tolist() == [4, 3]
    assert svd(X, key="w", top=0)[0].shape == (4, 0)
    assert svd(X, key="w", floor=2.0)[1].tolist() == [4, 3]


def test_badly_conditioned_factors_stay_orthonormal() -> None:
    X = normal(200, 20) * torch.logspace(0, -6, 20, dtype=torch.float64)
    U, s, _ = svd(X, key="w")
    assert len(s) == 20
    torch.testing.assert_close(U.T @ U, identity(20), atol=1e-8, rtol=0)
    W = polar(X, key="w")
    torch.testing.assert_close(W.T @ W, identity(20), atol=1e-8, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_polar_is_orthonormal_and_nearest(shape: tuple[int, int]) -> None:
    X = normal(*shape)
    W = polar(X, key="w")
    assert W.shape == X.shape
    torch.testing.assert_close(W.T @ W if shape[0] >= shape[1] else W @ W.T, identity(min(shape)), atol=1e-9, rtol=0)
    best = torch.dist(W, X)
    for seed in range(1, 30):
        noise = normal(*shape, seed=seed)
        for other in (orthonormal(noise), orthonormal(W + 0.05 * noise)):  # anywhere, and close by
            assert torch.dist(other, X) >= best - 1e-12


def test_polar_of_orthonormal_columns_is_itself_and_without_full_rank_the_partial_isometry() -> None:
    Q = torch.linalg.qr(normal(30, 6)).Q
    torch.testing.assert_close(polar(Q, key="w"), Q)
    torch.testing.assert_close(polar(3 * Q.T, key="w"), Q.T)
    u = torch.tensor([[3.0], [4.0], [0.0]]) / 5
    v = torch.tensor([[0.0], [1.0]])
    torch.testing.assert_close(polar(7 * u @ v.T, key="w").float(), u @ v.T)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4)])
def test_zero_has_no_directions(shape: tuple[int, int]) -> None:
    U, s, Vh = svd(torch.zeros(shape), key="w")
    assert (U.shape, s.shape, Vh.shape) == ((shape[0], 0), (0,), (0, shape[1]))
    assert torch.equal(polar(torch.zeros(shape), key="w"), torch.zeros(shape, dtype=torch.float64))


def test_other_solvers_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    X = normal(40, 10)
    expected, W = svd(X, key="w"), polar(X, key="w")

    def fail(*_: object, **__: object) -> NoReturn:
        raise torch.linalg.LinAlgError("did not converge")  # type: ignore[attr-defined]

    monkeypatch.setattr(torch.linalg, "svd", fail)
    for got, want in zip(svd(X, key="w"), expected, strict=True):
        torch.testing.assert_close(got, want)

    torch.testing.assert_close(polar(X, key="w"), W)
    assert len(svd(normal(20, 3) @ normal(3, 20), key="w")[1]) == 3

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    with pytest.raises(NumericalError, match=r"neither an SVD of 'layer\.0\.weight'.*task_arithmetic"):
        svd(X, key="layer.0.weight")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_is_refused(bad: float) -> None:
    X = normal(4, 3)
    X[1, 2] = bad
    with pytest.raises(NumericalError, match=r"'q\.weight' must be finite .* 1 of 12 elements .*leave that"):
        svd(X, key="q.weight")
    with pytest.raises(NumericalError, match=r"'q\.weight' must be finite"):
        polar(X.T, key="q.weight")


TABLES = [
    *("bert.embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight", "visual.positional_embedding"),
    *("shared.weight", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
    *("transformer.wte.weight", "PositionTable.weight"),
]
LINEAR = ["encoder.layer.0.attention.self.query.weight", "visual.proj", "pooler.dense.weight", "w"]


@pytest.mark.parametrize("key", [*TABLES, *LINEAR])
def test_tables_by_name(key: str) -> None:
    assert is_table(key) == (key in TABLES)
