"""KL with a prior: the optimum of the printed objective, the same from wherever it starts, and a default for few."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.alignment.planted import divergence, doubles, exact, head_in, planted_task, same_head, turn
from torch.nn.functional import kl_div

from orthomerge.alignment import newton
from orthomerge.alignment.auto import Auto
from orthomerge.alignment.folding import centred_rows, first_map, logits_from, with_first_map
from orthomerge.alignment.kl_map import DEFAULT, STRENGTHS, KlMap, KlProblem
from orthomerge.alignment.problem import Problem
from orthomerge.core.errors import NumericalError
from orthomerge.models.heads import Head
from orthomerge.testing.toys import HEADS, head_of, linear_head, pair_of


def problem_of(kind: str, *, count: int = 40, noise: float = 0.3) -> Problem:
    expert = doubles(count, 6, seed=1) + 1
    return Problem.of(pair_of(0.7 * expert @ turn(6) + noise * doubles(count, 6), expert), exact(head_of(kind)))


def change(problem: Problem, made: Head) -> torch.Tensor:
    """D [m, d] or, with a bias, [m, d + 1], whose last column is in units of a."""
    old, new = first_map(problem.head), first_map(made)
    D = new.weight - old.weight
    if old.bias is None or new.bias is None:
        return D
    return torch.cat([D, ((new.bias - old.bias) / problem.H.square().mean().sqrt())[:, None]], 1)


def objective(problem: Problem, D: torch.Tensor, strength: float) -> torch.Tensor:
    """As printed."""
    first, d = first_map(problem.head), problem.head.width
    bias = None if first.bias is None else first.bias + problem.H.square().mean().sqrt() * D[:, d]
    # A head written out, because a `Head` made by folding would refuse a graph's tensors in another dtype.
    values = torch.nn.functional.linear(problem.H, first.weight + D[:, :d], bias)
    if problem.head.hidden is not None and problem.head.activation is not None:
        values = problem.head.output(getattr(torch.nn.functional, problem.head.activation)(values))
    fit = kl_div(values.log_softmax(1), problem.Z.log_softmax(1), reduction="sum", log_target=True)
    prior = strength / centred_rows(problem.head).square().mean()
    return fit + prior / 2 * D.square().sum()


@pytest.mark.parametrize("kind", ["plain", "no bias", "normalising with bias"])
def test_nothing_is_better_than_the_optimum(kind: str) -> None:
    """Convex for a head of one layer: no change near or far, and no line through the optimum, leads lower."""
    problem = problem_of(kind)
    D = change(problem, head_in(KlMap(0.03).align(problem).classifier))
    least = float(objective(problem, D, 0.03))
    for seed in range(60):
        step = 10 ** (1 - seed % 5) * doubles(*D.shape, seed=seed)
        assert float(objective(problem, D + step, 0.03)) >= least - 1e-6
        middle = float(objective(problem, D + step / 2, 0.03))
        assert middle <= (least + float(objective(problem, D + step, 0.03))) / 2 + 1e-9


@pytest.mark.parametrize("kind", ["plain", "no bias", "normalising"])
def test_every_start_ends_at_the_same_place(kind: str) -> None:
    problem = problem_of(kind)
    kl, rows, first = KlProblem(problem), torch.arange(40), logits_from(problem.head, problem.H)
    V, seen = problem.spectrum.V, problem.spectrum.U * problem.spectrum.s
    found = kl.solve(rows, 0.03).G
    for seed in range(5):
        start = 3 * doubles(*found.shape, seed=seed)
        other = kl.solve(rows, 0.03, start).G
        one, two, far = (float(objective(problem, G @ V.T, 0.03)) for G in (found, other, start))
        assert two == pytest.approx(one, rel=1e-6)
        assert far > 1.5 * one
        said = [(first + seen @ G.T).softmax(1) for G in (found, other)]
        torch.testing.assert_close(*said, rtol=0, atol=5e-3)


@pytest.mark.parametrize("kind", HEADS)
def test_a_planted_map_is_found(kind: str) -> None:
    """Where the expert's outputs can be reached, a weak prior reaches them."""
    problem = problem_of(kind, noise=0.0)
    made = head_in(KlMap(1e-5).align(problem).classifier)
    before, after = (divergence(problem.Z, logits_from(head, problem.H)) for head in (problem.head, made))
    assert before > 0.1
    assert after < (1e-3 if problem.head.hidden is None else 2e-2) * before  # behind a tanh some are out of reach


def by_l_bfgs(problem: Problem, D: torch.Tensor, strength: float) -> float:
    """The least of the printed objective that torch's own optimiser finds from D, in a thousand iterations."""
    D = D.detach().clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [D], max_iter=1000, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = objective(problem, D, strength)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    return float(objective(problem, D.detach(), strength))


@pytest.mark.parametrize("strength", [1e-5, 0.003, 0.3])
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("count", [4, 40, 200])
def test_a_long_run_of_another_method_ends_no_lower(kind: str, strength: float, count: int) -> None:
    """From no change where there is one optimum, from ours where a hidden layer may have several.

    With a hidden layer and next to no prior the Gauss-Newton matrix is no good guide, and 200 steps may not be enough.
    """
    problem = problem_of(kind, count=count)
    if problem.head.hidden is not None:
        strength = max(strength, 1e-3)
    found = KlMap(strength).align(problem)
    D = change(problem, head_in(found.classifier))
    least = by_l_bfgs(problem, D if problem.head.hidden is not None else 0 * D, strength)
    assert float(objective(problem, D, strength)) <= least * (1 + 1e-6) + 1e-9
    assert found.facts["converged"] is True
    assert 0 < float(found.facts["steps"]) < 100


@pytest.mark.parametrize("kind", HEADS)
def test_too_few_steps_are_no_secret(kind: str) -> None:
    found = KlMap(1e-3, steps=1).align(problem_of(kind, count=200))
    assert (found.facts["converged"], found.facts["steps"]) == (False, 1)


def test_a_path_of_strengths_does_not_change_where_it_ends() -> None:
    problem = planted_problem(classes=7)
    kl, rows, G = KlProblem(problem), torch.arange(len(problem.H)), None
    for strength in STRENGTHS[1:]:
        warm, cold = kl.solve(rows, strength, G), kl.solve(rows, strength)
        assert warm.converged
        assert cold.converged
        assert warm.value == pytest.approx(cold.value, rel=1e-6)
        torch.testing.assert_close(warm.G, cold.G, rtol=0, atol=0.01 * float(cold.G.abs().max()))
        G = warm.G


def planted_problem(*, classes: int) -> Problem:
    task = planted_task(30, classes=classes)
    return Problem.of(task.pair, exact(task.head))


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("count", [4, 40])
def test_what_a_gpu_solves_with_is_the_same_matrix(kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(kind, count=count)
    rows, first = KlProblem(problem)._all, KlProblem(problem)._all.base
    local, most = newton._Local(rows, first, 0.1), newton._PAIRS * count
    w = local.curvatures()
    counted = w > (max(newton._FAINT, float(w.flatten().topk(most).values[-1])) if w.numel() > most else newton._FAINT)
    D = 0.1 + torch.where(counted, 0.0, w).sum(0)[:, None] * rows.X.square().mean(0)
    monkeypatch.setattr(newton, "_CLASSES", 2)
    gradient = doubles(first.shape[1], rows.X.shape[1], seed=3)
    expected = local.preconditioner()(gradient)
    torch.testing.assert_close(local._whole(D, torch.where(counted, w, 0.0))(gradient), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("aligner", [KlMap, Auto])
@pytest.mark.parametrize("kind", HEADS)
def test_a_gpu_finds_the_same(kind: str, aligner: type[KlMap] | type[Auto]) -> None:
    problem = problem_of(kind, count=300)
    here, there = (aligner(device=device).align(problem) for device in ("cpu", "cuda"))
    fact = "kept" if aligner is Auto else "strength"
    assert here.facts[fact] == there.facts[fact]
    one, two = (logits_from(head_in(found.classifier), problem.H).softmax(1) for found in (here, there))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", [1, 2, 3, 6, 9])
def test_few_inputs_leave_the_default_alone(count: int, seed: int) -> None:
    task = planted_task(5, seed=seed)
    few = pair_of(task.pair.merged.values[:count], task.pair.expert.values[:count])
    assert KlMap().fit(few, task.head).facts["strength"] == DEFAULT


def test_many_inputs_choose() -> None:
    """Other than the default, where the expert can be reached without one and where nothing can be learned of it."""
    assert float(KlMap().align(problem_of("plain", count=200, noise=0.0)).facts["strength"]) < DEFAULT
    merged = doubles(200, 6)
    noisy = pair_of(merged, merged + 3 * doubles(200, 6, seed=1))
    assert float(KlMap().fit(noisy, exact(head_of("plain"))).facts["strength"]) >= DEFAULT


def kl_with(losses: Sequence[Sequence[float]], monkeypatch: pytest.MonkeyPatch) -> KlProblem:
    """A problem whose held-out losses are known: one row a strength."""
    rows = dict(zip(STRENGTHS, torch.tensor(losses, dtype=torch.float64), strict=False))

    def held_out(self: KlProblem, strength: float, states: Any) -> Any:
        return rows[strength], states

    monkeypatch.setattr(KlProblem, "held_out", held_out)
    return KlProblem(problem_of("plain", count=12))


def test_the_strength_is_the_nearest_to_the_default_of_all_near_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    default = STRENGTHS.index(DEFAULT)
    flat = [[1.0, 2.0, 3.0, 4.0] * 3] * len(STRENGTHS)
    assert kl_with(flat, monkeypatch).chosen() == DEFAULT
    # Surely worse everywhere but at two places: the nearer one, though the other is a little better.
    clear = [[9.0, 9.1, 9.0, 9.1] * 3] * len(STRENGTHS)
    clear[0] = [0.5, 1.9, 0.5, 1.0] * 3
    clear[default + 2] = [1.0, 1.0, 1.0, 1.2] * 3
    assert kl_with(clear, monkeypatch).chosen() == STRENGTHS[default + 2]
    clear[default + 2] = [2.0, 2.1, 2.0, 2.1] * 3
    assert kl_with(clear, monkeypatch).chosen() == math.inf
    # Rising for the third time in a row: the rest would raise a KeyError here.
    rows = [[value] * 12 for value in (5.0, 1.0, 0.5, 2.0, 3.0)]
    assert kl_with(rows, monkeypatch).chosen() == STRENGTHS[2]


def test_held_out_inputs_are_held_out() -> None:
    """Every judged input under a fit to the four folds that it is not in."""
    problem = problem_of("plain", count=11)
    kl = KlProblem(problem)
    judged = kl.held
    assert sorted(judged.tolist()) == list(range(11))
    losses, _ = kl.held_out(0.3)
    for place, row in enumerate(judged.tolist()):
        rest = torch.tensor([other for at, other in enumerate(judged.tolist()) if at % 5 != place % 5])
        start = torch.zeros(3, len(problem.spectrum.s), dtype=torch.float64)
        D = kl.solve(rest, 0.3, start, tolerance=0.1).G @ problem.spectrum.V.T
        first = first_map(problem.head)
        assert first.bias is not None
        made = with_first_map(
            problem.head, first.weight + D[:, :6], first.bias + problem.spectrum.a * D[:, 6], task="toy"
        )
        wanted = divergence(problem.Z[row : row + 1], logits_from(made, problem.H[row : row + 1]))
        assert float(losses[place]) == pytest.approx(wanted, abs=1e-10)
    judged = KlProblem(problem_of("plain", count=700)).held
    assert len(judged) == len(set(judged.tolist())) == 500
    unchanged, _ = kl.held_out(math.inf)
    assert float(unchanged.mean()) == pytest.approx(divergence(problem.Z, logits_from(problem.head, problem.H)))


def test_one_class_has_nothing_to_learn_and_a_head_that_is_not_finite_is_refused() -> None:
    head = linear_head(doubles(1, 6).float(), doubles(1, seed=1).float())
    assert same_head(KlMap().fit(pair_of(doubles(20, 6), doubles(20, 6, seed=1)), head).classifier, head)
    head = linear_head(torch.full((3, 6), math.nan), torch.zeros(3))
    with pytest.raises(NumericalError, match="kl-map diverged on 'toy'; raise its strength, or use 'ridge'"):
        KlMap(0.1).fit(pair_of(doubles(9, 6), doubles(9, 6, seed=1)), head)
