"""The choice of kappa and of the share of the shift, against refitting on every fold."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from tests.alignment.planted import doubles, exact, turn

from orthomerge.alignment.aligners import make_aligner
from orthomerge.alignment.folding import centred_rows
from orthomerge.alignment.problem import Problem, near_best
from orthomerge.alignment.rigid import FOLDS, KAPPAS, scale_of, turn_of
from orthomerge.testing.toys import linear_head, pair_of

D = 6


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
            (H, h), (T, t) = ((all_[fold != number], all_[fold == number]) for all_ in (problem.H, problem.T))
            mean_h, mean_t = H.mean(0), T.mean(0)
            turned, target = (H - mean_h, T - mean_t) if bias else (H, T)
            S, energy = target.T @ turned, float(turned.square().sum())
            A = turn_of(S, energy, kappa, d=D, task="toy")
            scale = scale_of(A, S, energy, kappa) if scaled else 1.0
            error = (scale * h @ A.T + share * (mean_t - scale * A @ mean_h) - t) @ W.T
            row.append(float(error.square().sum(1).mean()))
        losses.append(row)
    return list(product(kappas, shares))[near_best(torch.tensor(losses, dtype=torch.float64))[0]]


@pytest.mark.parametrize("name", ["orthogonal", "similarity"])
def test_wide_features_are_chosen_by_through_their_leading_directions(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
