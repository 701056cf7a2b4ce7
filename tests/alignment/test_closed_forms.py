"""Maps in closed form: what was planted is found, what is optimal beats all others, and folding is exact."""

import math
from itertools import pairwise
from typing import cast

import pytest
import torch
from tests.alignment.planted import (
    LINEAR,
    RIGID,
    SEES_A,
    SEES_BOTH,
    D,
    doubles,
    exact,
    fit,
    head_in,
    same_head,
    turn,
    weight_of,
)

from orthomerge.alignment.folding import centred_rows, first_map, folded, logits_from, read_by, with_first_map
from orthomerge.alignment.linear_maps import Scaling, lifted
from orthomerge.alignment.logit_procrustes import LogitProcrustes, descend
from orthomerge.alignment.problem import near_best
from orthomerge.alignment.rigid import Orthogonal, Similarity, polar_factor, scale_of, turn_of
from orthomerge.core.errors import IncompatibleError, NumericalError
from orthomerge.testing.toys import HEADS, head_of, linear_head, pair_of

# What was planted is found to 1e-8.


@pytest.mark.parametrize("reflected", [False, True])
@pytest.mark.parametrize("name", [*RIGID, *LINEAR])
def test_a_planted_rotation(name: str, reflected: bool) -> None:
    """A reflection is as good: folding does not care for the sign of a determinant."""
    expert, A = doubles(50, D), turn(D)
    if reflected:
        A = A @ torch.diag(torch.tensor([-1.0] + [1.0] * (D - 1), dtype=torch.float64))
    assert (A - torch.eye(D)).norm() > 1
    options = {"kappa": 0.0} if name in RIGID else {"strength": 0.0}
    for head in (exact(linear_head(doubles(3, D, seed=3))), SEES_A):
        found = weight_of(fit(name, pair_of(expert @ A, expert), head, **options).classifier)
        wanted = head.output.weight @ A
        if name == "ridge":  # it leaves alone what is common to all classes
            found, wanted = found - found.mean(0), wanted - wanted.mean(0)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", ["orthogonal", "similarity", "affine", "logit-procrustes"])
def test_a_planted_rotation_with_a_shift(name: str) -> None:
    expert, A, shift = doubles(50, D), turn(D), 3 * doubles(D, seed=2)
    options = {"strength": 0.0} if name == "affine" else {"kappa": 0.0}
    head = head_in(fit(name, pair_of((expert - shift) @ A, expert), SEES_BOTH, **options).classifier)
    torch.testing.assert_close(head.output.weight, A, rtol=0, atol=1e-8)
    torch.testing.assert_close(head.output.bias, shift, rtol=0, atol=1e-8)


def test_a_planted_similarity() -> None:
    expert, A, shift = doubles(50, D), turn(D), 3 * doubles(D, seed=2)
    found = Similarity(kappa=0).fit(pair_of(0.25 * (expert - shift) @ A, expert), SEES_BOTH)
    head = head_in(found.classifier)
    assert found.facts["scale"] == pytest.approx(4, abs=1e-9)
    torch.testing.assert_close(head.output.weight, 4 * A, rtol=0, atol=1e-8)
    torch.testing.assert_close(head.output.bias, shift, rtol=0, atol=1e-8)


def test_a_planted_scaling() -> None:
    expert, factors = doubles(50, D), torch.tensor([0.5, -2.0, 1.0, 3.0, 0.1, 7.0], dtype=torch.float64)
    found = Scaling(prior=0).fit(pair_of(expert / factors, expert), SEES_A)
    torch.testing.assert_close(weight_of(found.classifier), factors.diag(), rtol=0, atol=1e-8)
    assert found.facts == {"least": pytest.approx(-2, abs=1e-9), "most": pytest.approx(7, abs=1e-9)}


@pytest.mark.parametrize("name", ["linear", "invertible", "affine"])
def test_a_planted_linear_map(name: str) -> None:
    merged, A = doubles(50, D), doubles(D, D, seed=5)
    shift = 3 * doubles(D, seed=2) if name == "affine" else torch.zeros(D)
    head = head_in(fit(name, pair_of(merged, merged @ A.T + shift), SEES_BOTH, strength=0.0).classifier)
    torch.testing.assert_close(head.output.weight, A, rtol=0, atol=1e-8)
    torch.testing.assert_close(head.output.bias, shift.double(), rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("name", ["orthogonal", "logit-procrustes", "linear", "ridge"])
def test_every_kind_of_head_gets_a_planted_rotation(name: str, kind: str) -> None:
    """A head that normalises does not care how long features are; rotating them is all there is to undo."""
    head, expert, A = exact(head_of(kind)), doubles(60, D), turn(D)
    merged = expert @ A
    if head.normalise:
        merged = merged * (1 + doubles(60, 1, seed=7).abs())
    options = {"kappa": 0.0, "bias": False} if name in ("orthogonal", "logit-procrustes") else {"strength": 0.0}
    found = fit(name, pair_of(merged, expert), head, **options).classifier
    wanted = folded(head, A, task="toy")
    logits, weights = (found(merged), head(expert)), (weight_of(found), weight_of(wanted))
    if name == "ridge" and head.hidden is None:  # but for what is common to all classes
        logits = (logits[0] - logits[0].mean(1, keepdim=True), logits[1] - logits[1].mean(1, keepdim=True))
        weights = (weights[0] - weights[0].mean(0), weights[1] - weights[1].mean(0))
    for one, other in (logits, weights):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-8)


def test_a_quarter_turn_by_hand() -> None:
    """(1, 0) and (0, 2) became what (0, 1) and (-2, 0) were: A = [[0, -1], [1, 0]]."""
    pair = pair_of(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[0.0, 1.0], [-2.0, 0.0]]))
    found = Orthogonal(kappa=0).fit(pair, linear_head(torch.tensor([[1.0, 2.0], [3.0, 4.0]])))
    torch.testing.assert_close(weight_of(found.classifier), torch.tensor([[2.0, -1.0], [4.0, -3.0]]))


def test_scaling_by_hand() -> None:
    """C = (5, 0), S = (10, 0), p = 2 (5 + 0) / (2 inputs x 2 features) = 2.5: (10 + 2.5) / (5 + 2.5), and 1."""
    pair = pair_of(torch.tensor([[1.0, 0.0], [2.0, 0.0]]), torch.tensor([[2.0, 9.0], [4.0, 9.0]]))
    found = Scaling(prior=2).fit(pair, linear_head(torch.eye(2)))
    torch.testing.assert_close(weight_of(found.classifier).diagonal(), torch.tensor([12.5 / 7.5, 1.0]))


def test_a_scale_by_hand() -> None:
    """With kappa the scale is (tr A^T S + kappa tr C) / ((1 + kappa) tr C), here (3 + 1) / 2 and 3."""
    S = 3 * torch.eye(2)
    for kappa, wanted in ((0.0, 3.0), (1.0, 2.0), (math.inf, 1.0)):
        A = turn_of(S, 2.0, kappa, d=2, task="toy")
        torch.testing.assert_close(A, torch.eye(2))
        assert scale_of(A, S, 2.0, kappa) == pytest.approx(wanted)


def test_near_the_best_is_what_is_not_surely_worse() -> None:
    assert near_best(torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])) == [1]
    assert near_best(torch.tensor([[1.0, 1.0], [1.0, 1.0]])) == [0, 1]
    # Means 1 and 0; the excess (3, 0, 0) has a standard error of exactly 1.
    assert near_best(torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, 0.0]])) == [0, 1]
    assert near_best(torch.tensor([[2.0, 1.0, 0.1], [0.0, 0.0, 0.0]])) == [1]


def test_lifting_by_hand() -> None:
    A, condition = lifted(torch.diag(torch.tensor([2.0, 1e-9, 0.0], dtype=torch.float64)), 1e-3)
    torch.testing.assert_close(A.diagonal().abs(), torch.tensor([2.0, 2e-3, 2e-3], dtype=torch.float64))
    assert condition == pytest.approx(1e3)
    regular = doubles(D, D)
    same, condition = lifted(regular, 1e-6)
    assert same is regular
    assert condition == pytest.approx(float(torch.linalg.cond(regular)))


def test_procrustes_beats_every_orthogonal_map() -> None:
    H, T = doubles(40, D), doubles(40, D, seed=1)
    A = weight_of(Orthogonal(kappa=0).fit(pair_of(H, T), SEES_A).classifier)
    best = float((H @ A.T - T).square().sum())
    turns = [torch.linalg.qr(doubles(D, D, seed=seed))[0] for seed in range(500)]
    turns += [A @ turn(D, angle=angle, seed=seed) for seed in range(50) for angle in (1e-4, 1e-2, 0.3)]
    assert all(float((H @ Q.T - T).square().sum()) >= best - 1e-9 for Q in turns)


def test_a_shift_makes_procrustes_better_still() -> None:
    H, T = doubles(40, D) + 2, doubles(40, D, seed=1) - 1
    with_it, without = (
        head_in(Orthogonal(kappa=0, bias=bias).fit(pair_of(H, T), SEES_BOTH).classifier) for bias in (True, False)
    )
    assert (with_it(H) - T).square().sum() < 0.9 * (without(H) - T).square().sum()
    torch.testing.assert_close(with_it(H).mean(0), T.mean(0))  # the means lie on each other
    assert torch.equal(cast("torch.Tensor", without.output.bias), torch.zeros(D, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(40, 40), (40, 3), (3, 40)])
def test_polar_factors_are_orthogonal_or_refused(shape: tuple[int, int]) -> None:
    """Even of a matrix that has no full rank."""
    n, d = shape[0], 40
    S = doubles(d, shape[1]) @ doubles(shape[1], d, seed=1) if shape[1] < d else doubles(n, d).T @ doubles(n, d, seed=1)
    A = polar_factor(S, task="toy")
    torch.testing.assert_close(A.T @ A, torch.eye(d, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(A.T @ S, (A.T @ S).T, rtol=0, atol=1e-10)  # and what is left is symmetric
    with pytest.raises(NumericalError, match="an SVD for the map of 'toy' did not converge; use the aligner 'ridge'"):
        polar_factor(torch.full((3, 3), math.nan), task="toy")


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6, 1e9])
def test_a_planted_polar_factor(condition: float) -> None:
    """Of singular values that fall evenly; with as many digits as the condition leaves."""
    U, V = (torch.linalg.qr(doubles(30, 30, seed=seed))[0] for seed in (1, 2))
    sigma = torch.logspace(0, -math.log10(condition), 30, dtype=torch.float64)
    found = polar_factor(U * sigma @ V.T, task="toy")
    torch.testing.assert_close(found, U @ V.T, rtol=0, atol=max(1e-12, 1e-14 * condition))


def logit_loss(weight: torch.Tensor, W: torch.Tensor, H: torch.Tensor, T: torch.Tensor) -> float:
    return float((H @ weight.T - T @ W.T).square().sum())


def plain_start(W: torch.Tensor, H: torch.Tensor, T: torch.Tensor, kappa: float) -> torch.Tensor:
    """The head under Procrustes."""
    return W @ turn_of(T.T @ H, float(H.square().sum()), kappa, d=H.shape[1], task="toy")


@pytest.mark.parametrize("classes", [2, 3, 9])
@pytest.mark.parametrize("kappa", [0.0, 0.3])
def test_logit_procrustes_keeps_the_gram_matrix(kappa: float, classes: int) -> None:
    """More classes than features: rows of the head that depend on each other go on doing so."""
    W = doubles(classes, D, seed=3)
    found = LogitProcrustes(kappa=kappa).fit(pair_of(doubles(40, D), doubles(40, D, seed=1)), linear_head(W))
    made = weight_of(found.classifier)
    torch.testing.assert_close(made @ made.T, W @ W.T, rtol=0, atol=1e-8)


def test_logit_procrustes_falls_and_ends_below_procrustes() -> None:
    H, W = doubles(40, D), doubles(3, D, seed=3)
    T = H @ turn(D).T + doubles(40, D, seed=1)
    start, C, S = plain_start(W, H, T, 0.0), H.T @ H, T.T @ H
    losses = [
        logit_loss(descend(W, start, C, S, 0.0, steps=steps, tolerance=0.0)[0], W, H, T)
        for steps in (0, 1, 2, 3, 5, 10, 50, 2000)
    ]
    assert losses[0] == pytest.approx(logit_loss(start, W, H, T))
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(losses))
    assert losses[-1] < losses[0] - 1
    found = LogitProcrustes(kappa=0).fit(pair_of(H, T), linear_head(W))
    assert logit_loss(weight_of(found.classifier), W, H, T) <= losses[0]
    assert 0 < float(found.facts["steps"]) <= 200


def one_by_one(
    W: torch.Tensor, Q: torch.Tensor, C: torch.Tensor, S: torch.Tensor, kappa: float, *, steps: int
) -> torch.Tensor:
    """W' by majorisation with one bound for all rows, not ahead of itself; W of full rank."""
    values, vectors = torch.linalg.eigh(W @ W.T)
    K = vectors * values.sqrt() @ vectors.T
    first, s = torch.linalg.solve(K, W), float(C.trace()) / W.shape[1]
    bound, Q = float(values[-1] * torch.linalg.eigvalsh(C)[-1]), torch.linalg.solve(K, Q)
    for _ in range(steps):
        Q = polar_factor(bound * Q - K @ K @ (Q @ C - kappa * s * first) + K @ W @ S, task="toy")
    made: torch.Tensor = K @ Q
    return made


@pytest.mark.parametrize("kappa", [1e-4, 0.1, 1.0])
@pytest.mark.parametrize("classes", [2, 5, 12])
def test_logit_procrustes_ends_below_200_plain_steps(kappa: float, classes: int) -> None:
    """Along features of unequal variance and a head of unequal rows, where plain steps crawl."""
    d, sizes = 40, torch.arange(1, 41).pow(-0.5).double()
    T, W = doubles(200, d) * sizes, doubles(classes, d, seed=3) * torch.arange(1, classes + 1)[:, None]
    H = 0.7 * T @ turn(d) + 0.3 * sizes * doubles(200, d, seed=1)
    start, C, S = plain_start(W, H, T, kappa), H.T @ H, T.T @ H

    def objective(weight: torch.Tensor) -> float:
        pull = kappa * float(C.trace()) / d * float((W * weight).sum())
        return logit_loss(weight, W, H, T) - 2 * pull

    made, steps = descend(W, start, C, S, kappa, steps=200)
    assert steps < 200
    before, plain = objective(start), objective(one_by_one(W, start, C, S, kappa, steps=200))
    assert before - objective(made) >= (1 - 1e-5) * (before - plain)  # where plain steps have converged: the same
    torch.testing.assert_close(made @ made.T, W @ W.T, rtol=0, atol=1e-8)


@pytest.mark.parametrize("kappa", [0.0, 0.3])
def test_logit_procrustes_stops_where_no_turn_helps(kappa: float) -> None:
    """The printed objective at W' = K Q, and near it."""
    H, T, W = doubles(40, D), doubles(40, D, seed=1), doubles(3, D, seed=3)
    start, C, S = plain_start(W, H, T, kappa), H.T @ H, T.T @ H
    made, _ = descend(W, start, C, S, kappa, steps=5000, tolerance=1e-12)

    def objective(weight: torch.Tensor) -> float:
        # <K^2 Q_0, Q> = <K Q_0, K Q> = <W, W'>.
        pull = kappa * float(C.trace()) / D * float((W * weight).sum())
        return logit_loss(weight, W, H, T) - 2 * pull

    least = objective(made)
    turned = [made @ turn(D, angle=angle, seed=seed) for seed in range(50) for angle in (1e-3, 0.1)]
    assert all(objective(weight) >= least - 1e-6 for weight in turned)
    assert least <= objective(start)


def test_folding_by_hand() -> None:
    # W = [[1, 2], [3, 4]], A swaps both features and doubles the first: W A = [[4, 1], [8, 3]]; W c + b = (5, 11) + 1.
    head = linear_head(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(2))
    A = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    found = folded(head, A, torch.tensor([1.0, 2.0]), task="toy").output
    assert found.weight.tolist() == [[4, 1], [8, 3]]
    assert found.bias is not None
    assert found.bias.tolist() == [6, 12]
    assert head.output.weight.tolist() == [[1, 2], [3, 4]]  # the old head stays


def test_what_a_head_reads_and_what_softmax_does_not_see() -> None:
    f = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert read_by(linear_head(torch.eye(2)), f).tolist() == f.tolist()
    unit = read_by(linear_head(torch.eye(2), normalise=True), f)
    assert unit.dtype == torch.float64
    assert unit.tolist() == [[0.6, 0.8], [0, 0]]  # what has no direction has none
    head = linear_head(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    assert centred_rows(head).tolist() == [[-1, -2], [1, 2]]
    hidden = head_of("hidden")
    assert hidden.hidden is not None
    assert torch.equal(centred_rows(hidden), hidden.hidden.weight.double())  # but an activation does


@pytest.mark.parametrize("kind", HEADS)
def test_folding_is_exact_and_twice_is_the_product(kind: str) -> None:
    """For any A, not only orthogonal ones, and behind a head that normalises too."""
    head, f, A = exact(head_of(kind)), doubles(9, 6), doubles(6, 6, seed=7)
    shift = doubles(6, seed=8) if first_map(head).bias is not None else None
    x = read_by(head, f)
    mapped = x @ A.T if shift is None else x @ A.T + shift
    found = folded(head, A, shift, task="toy")
    torch.testing.assert_close(found(f), logits_from(head, mapped), rtol=0, atol=1e-12)
    assert {name: tensor.shape for name, tensor in found.tensors().items()} == {
        name: tensor.shape for name, tensor in head.tensors().items()
    }
    torch.testing.assert_close(logits_from(head, read_by(head, f)), head(f), rtol=0, atol=1e-12)
    twice = folded(folded(head, A, task="toy"), doubles(6, 6, seed=8), task="toy")
    once = folded(head, A @ doubles(6, 6, seed=8), task="toy")
    for name, tensor in once.tensors().items():
        torch.testing.assert_close(twice.tensors()[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", HEADS)
def test_the_identity_changes_no_bit(kind: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        head = head_of(kind).to(dtype)
        shift = torch.zeros(6) if first_map(head).bias is not None else None
        assert same_head(folded(head, torch.eye(6), shift, task="toy"), head)


def test_folds_that_are_refused() -> None:
    head = head_of("no bias")
    with pytest.raises(IncompatibleError, match="head of 'toy' has no bias that could take up a shift"):
        folded(head, torch.eye(6), torch.ones(6), task="toy")
    with pytest.raises(IncompatibleError, match="aligned head of 'toy' would not have the shape of the expert's"):
        with_first_map(head, torch.ones(3, 5), None, task="toy")
    with pytest.raises(IncompatibleError, match="would not have the shape"):
        with_first_map(head, head.output.weight, torch.ones(3), task="toy")
    with pytest.raises(NumericalError, match="aligned head of 'toy' is not finite; give more inputs, or another"):
        folded(head, torch.full((6, 6), float("nan")), task="toy")
    half = linear_head(head.output.weight.half(), torch.ones(3).half())
    with pytest.raises(NumericalError, match="is not finite"):  # it was, until it became half precision
        folded(half, torch.eye(6), torch.full((6,), 1e6), task="toy")
