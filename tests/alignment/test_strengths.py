"""Strengths against refitting again and again: leave-one-out of ridge, folds of rotations; and one family of maps."""

import math
from itertools import product
from typing import cast

import pytest
import torch
from tests.alignment.planted import doubles, exact, head_in, turn, weight_of

from orthomerge.alignment.aligners import make_aligner
from orthomerge.alignment.folding import centred_rows, first_map
from orthomerge.alignment.kl_map import STRENGTHS as KL_STRENGTHS
from orthomerge.alignment.kl_map import KlMap
from orthomerge.alignment.linear_maps import Affine, Linear, Ridge
from orthomerge.alignment.problem import STRENGTHS, Problem, Spectrum, near_best
from orthomerge.alignment.rigid import FOLDS, KAPPAS, scale_of, turn_of
from orthomerge.models.heads import Head
from orthomerge.testing.toys import HEADS, head_of, linear_head, pair_of

SHAPES = [(7, 12), (12, 12), (40, 6)]  # fewer inputs than features, as many, more


def design(H: torch.Tensor, *, biased: bool) -> torch.Tensor:
    """X = [H, a 1]; a is the size of a typical feature."""
    a = H.square().mean().sqrt()
    return torch.cat([H, a.expand(len(H), 1)], 1) if biased else H


def solved(X: torch.Tensor, R: torch.Tensor, penalty: float) -> torch.Tensor:
    """D as printed."""
    size = X.shape[1]
    D: torch.Tensor = torch.linalg.solve(X.T @ X + penalty * torch.eye(size, dtype=torch.float64), X.T @ R)
    return D


def unit(X: torch.Tensor) -> float:
    """The mean eigenvalue of X^T X."""
    return float(X.square().sum()) / X.shape[1]


def test_by_hand_and_one_input_changes_nothing() -> None:
    """X^T X = 4 in the first direction, unit (4 + 0) / 2: strength 1 adds 2, and 4 / 6 of the residual is learned."""
    spectrum = Spectrum.of(torch.tensor([[2.0, 0.0]], dtype=torch.float64), biased=False)
    R = torch.tensor([[6.0]], dtype=torch.float64)
    assert spectrum.unit == 2
    torch.testing.assert_close(spectrum.change(R, 1.0), torch.tensor([[2.0, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(spectrum.change(R, 0.0), torch.tensor([[3.0, 0.0]], dtype=torch.float64))
    assert spectrum.change(R, math.inf).tolist() == [[0, 0]]
    # Without its only input nothing is learned: 6 / 3 over 1 - 4 / 6.
    assert spectrum.leave_one_out(R, 1.0).item() == pytest.approx(6)
    problem = Problem.of(pair_of(doubles(1, 6), doubles(1, 6, seed=1)), head_of("plain"))
    assert problem.strength == math.inf


@pytest.mark.parametrize("strength", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("n", "d"), SHAPES)
def test_ridge_is_the_printed_formula(n: int, d: int, biased: bool, strength: float) -> None:
    H, R = doubles(n, d) + 1, doubles(n, 3, seed=1)
    X = design(H, biased=biased)
    expected = solved(X, R, strength * unit(X)).T
    torch.testing.assert_close(Spectrum.of(H, biased=biased).change(R, strength), expected)


@pytest.mark.parametrize("strength", [1e-4, 0.01, 1.0, 30.0, math.inf])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("n", "d"), SHAPES)
def test_leave_one_out_is_refitting_without_each(n: int, d: int, biased: bool, strength: float) -> None:
    """lambda and a stay as they are for all inputs: they are part of the choice that is judged."""
    H, R = doubles(n, d) + 1, doubles(n, 3, seed=1)
    X, expected = design(H, biased=biased), torch.empty(n, 3, dtype=torch.float64)
    for left in range(n):
        rest = torch.arange(n) != left
        D = solved(X[rest], R[rest], strength * unit(X)) if math.isfinite(strength) else torch.zeros(X.shape[1], 3)
        expected[left] = R[left] - X[left] @ D.double()
    found = Spectrum.of(H, biased=biased).leave_one_out(R, strength)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["plain", "no bias", "normalising", "hidden"])
@pytest.mark.parametrize("noise", [0.01, 0.5, 3.0])
def test_the_chosen_strength_is_the_largest_near_the_best(kind: str, noise: float) -> None:
    head, expert = exact(head_of(kind)), doubles(30, 6, seed=1)
    problem = Problem.of(pair_of(expert @ turn(6) + noise * doubles(30, 6), expert), head)
    X = design(problem.H, biased=problem.biased)
    R = (problem.T - problem.H) @ centred_rows(head).T
    errors = []
    for strength in STRENGTHS:
        row = []
        for left in range(30):
            rest = torch.arange(30) != left
            D = solved(X[rest], R[rest], strength * unit(X)) if math.isfinite(strength) else 0 * X[:1].T @ R[:1]
            row.append(float((R[left] - X[left] @ D).square().sum()))
        errors.append(row)
    losses = torch.tensor(errors, dtype=torch.float64)
    excess = losses - losses[losses.mean(1).argmin()]
    good = [
        strength
        for strength, row in zip(STRENGTHS, excess, strict=True)
        if row.mean() <= row.std() / math.sqrt(30) + 1e-12
    ]
    assert problem.strength == max(good)
    assert Ridge().align(problem).facts == {"strength": max(good)}


def common(head: Head) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The first map but for what is common to all classes."""
    first = first_map(head)
    if head.hidden is not None:
        return first.weight, first.bias
    return first.weight - first.weight.mean(0), None if first.bias is None else first.bias - first.bias.mean()


@pytest.mark.parametrize("strength", [1e-3, 0.1, 10.0])
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("count", [4, 40])
def test_an_affine_map_is_ridge_but_for_a_class_constant(kind: str, strength: float, count: int) -> None:
    """For a head without bias that is the linear map."""
    head, expert = exact(head_of(kind)), doubles(count, 6, seed=1) + 1
    problem = Problem.of(pair_of(0.7 * expert @ turn(6) + 0.3 * doubles(count, 6), expert), head)
    mapped: list[Affine | Linear] = [Affine(strength)] if problem.biased else [Affine(strength), Linear(strength)]
    weight, bias = common(head_in(Ridge(strength).align(problem).classifier))
    for each in mapped:
        found, shift = common(head_in(each.align(problem).classifier))
        torch.testing.assert_close(found, weight, rtol=0, atol=1e-9)
        assert (shift is None) == (bias is None)
        if shift is not None and bias is not None:
            torch.testing.assert_close(shift, bias, rtol=0, atol=1e-9)


def test_a_linear_map_is_the_printed_one() -> None:
    """A = I + (T^T H - C) (C + lambda I)^-1."""
    H, T = doubles(40, 6), doubles(40, 6, seed=1)
    C, eye = H.T @ H, torch.eye(6, dtype=torch.float64)
    A = weight_of(Linear(0.1).fit(pair_of(H, T), exact(linear_head(torch.eye(6)))).classifier)
    expected = eye + (T.T @ H - C) @ torch.linalg.inv(C + 0.1 * float(C.trace()) / 6 * eye)
    torch.testing.assert_close(A, expected)


@pytest.mark.parametrize(("aligner", "strengths"), [(Ridge, STRENGTHS), (KlMap, KL_STRENGTHS)])
def test_more_strength_is_less_change(aligner: type[Ridge] | type[KlMap], strengths: tuple[float, ...]) -> None:
    head = exact(head_of("plain"))
    problem = Problem.of(pair_of(doubles(20, 6), doubles(20, 6, seed=1)), head)
    sizes = [float((weight_of(aligner(s).align(problem).classifier) - head.output.weight).norm()) for s in strengths]
    assert sizes[0] == 0
    assert sizes == sorted(sizes)
    assert list(strengths) == sorted(strengths, reverse=True)


@pytest.mark.parametrize(("aligner", "near"), [(Ridge(), 1e-8), (KlMap(0.03), 5e-3)])
@pytest.mark.parametrize("size", [1e-3, 50.0])
def test_a_strength_means_the_same_in_every_unit(aligner: Ridge | KlMap, near: float, size: float) -> None:
    """Features and head in other units give the same logits."""
    expert, bias = doubles(30, 6, seed=1), doubles(3, seed=4)
    merged, W = expert @ turn(6) + 0.3 * doubles(30, 6), doubles(3, 6, seed=3)
    one = aligner.fit(pair_of(merged, expert), linear_head(W, bias))
    other = aligner.fit(pair_of(size * merged, size * expert), linear_head(W / size, bias))
    assert one.facts["strength"] == other.facts["strength"]
    assert math.isfinite(cast("float", one.facts["strength"]))
    torch.testing.assert_close(one.classifier(merged), other.classifier(size * merged), rtol=0, atol=near)


def test_least_squares_is_the_best_head_there_is() -> None:
    """At strength 0, of all heads: no other is nearer to the expert's logits."""
    head, H, T = exact(head_of("plain")), doubles(40, 6), doubles(40, 6, seed=1)
    problem = Problem.of(pair_of(H, T), head)
    wanted = problem.Z - problem.Z.mean(1, keepdim=True)

    def error(weight: torch.Tensor, bias: torch.Tensor) -> float:
        logits = H @ weight.T + bias
        return float((logits - logits.mean(1, keepdim=True) - wanted).square().sum())

    made = head_in(Ridge(0.0).align(problem).classifier).output
    assert made.bias is not None
    least = error(made.weight, made.bias)
    for seed in range(200):
        step = 10 ** -(seed % 4) * doubles(3, 7, seed=seed)
        assert error(made.weight + step[:, :6], made.bias + step[:, 6]) >= least - 1e-9


@pytest.mark.parametrize("name", ["orthogonal", "similarity"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("noise", "count"), [(0.02, 100), (0.3, 100), (1.0, 100), (1.0, 12), (30.0, 40)])
def test_kappa_is_the_most_careful_of_all_near_the_best(name: str, noise: float, count: int, bias: bool) -> None:
    """As if every kappa and share had been tried on every fold, by refitting; a scale goes with the best turn."""
    expert = doubles(count, 6, seed=1) + 1
    merged = 0.8 * expert @ turn(6, angle=0.7) + noise * doubles(count, 6)
    head = exact(linear_head(torch.eye(6), torch.zeros(6) if bias else None))
    problem = Problem.of(pair_of(merged, expert), head)
    wanted = _refitted(problem, KAPPAS, bias=bias, scaled=False)
    if name == "similarity":
        kappas = KAPPAS if math.isinf(wanted[0]) else (math.inf, wanted[0])
        wanted = _refitted(problem, kappas, bias=bias, scaled=True)
    facts = make_aligner(name, {}).fit(pair_of(merged, expert), head).facts
    assert (facts["kappa"], facts["shift"]) == wanted


def _refitted(problem: Problem, kappas: tuple[float, ...], *, bias: bool, scaled: bool) -> tuple[float, float]:
    W, shares = centred_rows(problem.head), (0.0, 0.5, 1.0) if bias else (0.0,)
    fold, losses = torch.arange(len(problem.H)) % FOLDS, []
    for kappa, share in product(kappas, shares):
        row = []
        for number in range(FOLDS):
            (H, h), (T, t) = ((all_[fold != number], all_[fold == number]) for all_ in (problem.H, problem.T))
            mean_h, mean_t = H.mean(0), T.mean(0)
            turned, target = (H - mean_h, T - mean_t) if bias else (H, T)
            S, energy = target.T @ turned, float(turned.square().sum())
            A = turn_of(S, energy, kappa, d=6, task="toy")
            scale = scale_of(A, S, energy, kappa) if scaled else 1.0
            error = (scale * h @ A.T + share * (mean_t - scale * A @ mean_h) - t) @ W.T
            row.append(float(error.square().sum(1).mean()))
        losses.append(row)
    return list(product(kappas, shares))[near_best(torch.tensor(losses, dtype=torch.float64))[0]]


@pytest.mark.parametrize("name", ["orthogonal", "similarity"])
def test_wide_features_are_chosen_through_their_leading_directions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if through all of them."""
    d = 120
    sizes = torch.arange(1, d + 1).pow(-0.5)
    expert = doubles(400, d, seed=1) * sizes + 2
    merged = 0.7 * expert @ turn(d) + 0.2 * sizes * doubles(400, d)
    head = exact(linear_head(doubles(4, d, seed=3), doubles(4, seed=4)))
    led = make_aligner(name, {}).fit(pair_of(merged, expert), head).facts
    monkeypatch.setattr("orthomerge.alignment.rigid._LEADING", d)
    whole = make_aligner(name, {}).fit(pair_of(merged, expert), head).facts
    assert led == whole
    assert math.isfinite(float(led["kappa"]))
