"""Short cuts of the rotations: choices as if all had been tried, and the same map by another way."""

from __future__ import annotations

import math
from itertools import product
from typing import cast

import pytest
import torch
from tests.alignment.planted import doubles, exact, turn, weight_of
from tests.alignment.toys import head_of, linear_head, pair_of

from orthomerge.alignment.aligner import SumAligner
from orthomerge.alignment.aligners import make_aligner
from orthomerge.alignment.folding import centred_rows
from orthomerge.alignment.logit_procrustes import Basis, LogitProcrustes
from orthomerge.alignment.problem import Problem
from orthomerge.alignment.rigid import KAPPAS, careful, scale_of, seen_by, turn_of
from orthomerge.alignment.sums import FOLDS, Sums
from orthomerge.features.statistics import Moments

D = 6


@pytest.mark.parametrize("kind", ["plain", "no bias"])
@pytest.mark.parametrize("bias", [False, True])
def test_logit_procrustes_is_the_same_in_the_basis_of_the_decomposition(kind: str, bias: bool) -> None:
    """With a bias C is not diagonal in it: there are the ones and, if these are taken off, the means."""
    head, expert = exact(head_of(kind)), doubles(60, D, seed=1) + 3
    pair = pair_of(0.7 * expert @ turn(D) + 0.3 * doubles(60, D), expert)
    one, other = Problem.of(pair, head), Problem.of(pair, head)
    assert one.spectrum is one.known_spectrum
    assert other.known_spectrum is None
    moments = seen_by(one.sums, bias=bias and one.biased)
    basis = Basis.of(one.spectrum, one.sums.total, moments)
    assert basis is not None
    Q = doubles(3, D, seed=5)
    torch.testing.assert_close(basis.times_c(Q @ basis.axes) @ basis.axes.T, Q @ moments.C, rtol=0, atol=1e-9)
    assert basis.bound == pytest.approx(float((moments.C @ moments.C).norm()) ** 0.5)
    aligner = LogitProcrustes(kappa=0.1, bias=bias)
    ours, theirs = aligner.align(one), aligner.align(other)
    assert ours.facts == theirs.facts
    torch.testing.assert_close(weight_of(ours.classifier), weight_of(theirs.classifier), rtol=0, atol=1e-9)


def test_no_basis_where_it_would_be_wrong() -> None:
    """With fewer inputs than features, and where the mean is all that there is to see."""
    for rows in (doubles(4, D), doubles(40, D) + 1e4):
        problem = Problem.of(pair_of(rows, rows), exact(head_of("plain")))
        assert Basis.of(problem.spectrum, problem.sums.total, seen_by(problem.sums, bias=True)) is None


@pytest.mark.parametrize("name", ["orthogonal", "similarity", "logit-procrustes"])
@pytest.mark.parametrize("classes", [2, 150])
def test_wide_features_are_seen_alike_in_rows_and_in_sums(name: str, classes: int) -> None:
    """Through their leading directions, roughly: the choice is the same, and the map in all digits."""
    d = 120
    sizes = torch.arange(1, d + 1).pow(-0.5)
    expert = doubles(400, d, seed=1) * sizes + 2
    merged = 0.7 * expert @ turn(d) + 0.2 * sizes * doubles(400, d)
    head = exact(linear_head(doubles(classes, d, seed=3), doubles(classes, seed=4)))
    problem, aligner = Problem.of(pair_of(merged, expert), head), cast("SumAligner", make_aligner(name))
    ours, theirs = aligner.solve(problem.sums, head), aligner.solve(Sums(problem.sums.parts, "toy"), head)
    assert {key: pytest.approx(value) for key, value in theirs.facts.items()} == ours.facts
    assert 0 < cast("float", ours.facts["kappa"]) < math.inf
    torch.testing.assert_close(weight_of(ours.classifier), weight_of(theirs.classifier), rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", ["orthogonal", "similarity"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("noise", "count"), [(0.02, 100), (0.3, 100), (1.0, 100), (1.0, 12), (30.0, 40)])
def test_kappa_is_the_most_careful_of_all_near_the_best(name: str, noise: float, count: int, bias: bool) -> None:
    """As if every kappa and share had been tried on every fold, by refitting; a scale goes with the best turn."""
    expert = doubles(count, D, seed=1) + 1
    merged = 0.8 * expert @ turn(D, angle=0.7) + noise * doubles(count, D)
    head = exact(linear_head(torch.eye(D), torch.zeros(D) if bias else None))
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
            train, test = Moments.of(problem.H[fold != number], problem.T[fold != number]), fold == number
            sums = train.centred() if bias else train
            A = turn_of(sums, kappa, d=D, task="toy").A
            scale = scale_of(float((A * sums.S).sum()), float(sums.C.trace()), kappa) if scaled else 1.0
            shift = share * (train.mean_t - scale * A @ train.mean_h)
            error = (scale * problem.H[test] @ A.T + shift - problem.T[test]) @ W.T
            row.append(float(error.square().sum(1).mean() - (problem.T[test] @ W.T).square().sum(1).mean()))
        losses.append(row)
    return list(product(kappas, shares))[careful(torch.tensor(losses, dtype=torch.float64))]
