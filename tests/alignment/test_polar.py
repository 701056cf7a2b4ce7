"""Polar factors without an SVD: orthogonal, nearest, and right in as many digits as with one."""

from __future__ import annotations

import math

import pytest
import torch
from tests.alignment.planted import doubles, turn

from orthomerge.alignment import polar
from orthomerge.alignment.polar import Polar, polar_factor
from orthomerge.errors import NumericalError

D = 30


def planted(condition: float, *, d: int = D, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """X with singular values that fall evenly from `scale`, and its polar factor."""
    U, V = (torch.linalg.qr(doubles(d, d, seed=seed))[0] for seed in (1, 2))
    sigma = scale * torch.logspace(0, -math.log10(condition), d, dtype=torch.float64)
    return U * sigma @ V.T, U @ V.T


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which ways were gone beside eigenvectors."""
    calls: list[str] = []
    for name in ("_corrected", "_svd"):

        def watched(*given: object, name: str = name, made: object = getattr(polar, name), **more: object) -> object:
            calls.append(name)
            assert callable(made)
            return made(*given, **more)

        monkeypatch.setattr(polar, name, watched)
    return calls


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e9])
@pytest.mark.parametrize(
    ("condition", "ways"),
    [
        (1.0, []),
        (1e2, []),
        (1e3, []),
        (1e4, ["_corrected"]),
        (1e6, ["_corrected"]),
        (1e9, ["_corrected", "_svd"]),
        (1e14, ["_corrected", "_svd"]),
    ],
)
def test_every_condition_gets_its_digits(
    condition: float, ways: list[str], scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the condition leaves, which are those of an SVD, or ten."""
    (X, A), W = planted(condition, scale=scale), doubles(4, D, seed=3)
    calls, found = counted(monkeypatch), Polar(X, "toy")
    allowed = max(1e-10, 1e-14 * condition) * float(W.norm())
    torch.testing.assert_close(found.read_by(W), W @ A, rtol=0, atol=allowed)
    assert calls == ways
    many = doubles(2 * D, D)
    torch.testing.assert_close(found.read_by(many), many @ A, rtol=0, atol=allowed)
    torch.testing.assert_close(found.A, A, rtol=0, atol=allowed)
    torch.testing.assert_close(found.A.T @ found.A, torch.eye(D, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("d", [3, 30, 250])
def test_who_reads_little_of_what_is_wrong_needs_no_step(d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two heads, the one along the large singular values has its digits at once; both have them in the end."""
    (X, A), calls = planted(1e4, d=d), counted(monkeypatch)
    U = torch.linalg.svd(X)[0]
    for place, ways in ((0, []), (d - 1, ["_corrected"])):
        W = U[:, place : place + 1].T
        torch.testing.assert_close(Polar(X, "toy").read_by(W), W @ A, rtol=0, atol=1e-10)
        assert calls == ways


@pytest.mark.parametrize("condition", [10.0, 1e5, 1e6, 1e10])
@pytest.mark.parametrize("c", [0.0, 1e-3, 2.0])
def test_the_trace_along_what_was_added(condition: float, c: float) -> None:
    X, A = planted(condition)
    wanted = float((A * (X - c * torch.eye(D, dtype=torch.float64))).sum())
    assert Polar(X, "toy").along(c) == pytest.approx(wanted, abs=1e-14 * condition + 1e-9)


def test_a_step_gives_digits_back() -> None:
    """Eigenvectors of X^T X alone are right to the square of the condition; with two steps there is no difference."""
    X, A = planted(1e6)
    values, V = torch.linalg.eigh(X.T @ X)
    plain = float((X @ V / values.sqrt() @ V.T - A).norm())
    found, by_svd = (float((made - A).norm()) for made in (Polar(X, "toy").A, polar_factor(X, task="toy")))
    assert plain > 1e-6
    assert found < 3 * by_svd + 1e-12


def test_a_rotation_is_its_own_polar_factor() -> None:
    A = turn(D)
    for scale in (1e-9, 1.0, 1e9):
        torch.testing.assert_close(Polar(scale * A, "toy").A, A, rtol=0, atol=1e-13)
    still, W = Polar(doubles(D, D), "toy", still=True), doubles(4, D)
    assert torch.equal(still.A, torch.eye(D, dtype=torch.float64))
    assert torch.equal(still.read_by(W), W)


@pytest.mark.parametrize("rank", [0, 1, D - 1])
def test_without_full_rank_it_is_orthogonal_all_the_same(rank: int) -> None:
    X = doubles(D, rank) @ doubles(rank, D, seed=1)
    A = Polar(X, "toy").A
    torch.testing.assert_close(A.T @ A, torch.eye(D, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(A.T @ X, (A.T @ X).T, rtol=0, atol=1e-10)


def test_what_is_not_finite() -> None:
    X = doubles(D, D)
    X[2, 3] = math.nan
    with pytest.raises(NumericalError, match="an SVD for the map of 'toy' did not converge; use the aligner 'ridge'"):
        Polar(X, "toy").read_by(X[:2])
