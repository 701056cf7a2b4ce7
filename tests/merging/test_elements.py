"""Methods that merge entry by entry: theorems, their formulas written out naively, and options that are refused."""

import math
from collections.abc import Callable
from itertools import combinations
from typing import Any, get_args

import pytest
import torch
from tests.merging.making import merged, normal, random_vectors, stacked, vectors_of

from orthomerge.core.errors import RecipeError
from orthomerge.core.schema import maker_of, schema
from orthomerge.merging.angles import ModelStock, Slerp
from orthomerge.merging.dare import Dare, dare, dare_mergekit, dare_ties, dare_ties_mergekit
from orthomerge.merging.elements import Breadcrumbs, Consensus, MagMax, TaskArithmetic
from orthomerge.merging.methods import METHODS, make_method
from orthomerge.merging.ties import Ties, ties, ties_fusionbench, ties_per_tensor, ties_sum
from orthomerge.merging.vectors import TaskVectors

ELEMENT = [name for name, row in METHODS.items() if not row.matrices]
TASKS = ("a", "b", "c")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[key]) for key, tensor in one.items())


def reversed_order(vectors: TaskVectors) -> TaskVectors:
    return TaskVectors(dict(reversed(list(vectors.vectors.items()))))


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("name", ELEMENT)
def test_the_size_of_blocks_changes_no_bit(name: str, coarse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where equal entries and sums of zero abound either, nor where the runs of statistics cut across blocks."""
    monkeypatch.setattr("orthomerge.merging.statistics._RUN", 50)
    count = METHODS[name].experts[1] or 3
    method = make_method(name, {}, tasks=TASKS[:count])
    whole, *others = (
        merged(method, random_vectors(tile=tile, coarse=coarse, experts=count)) for tile in (1 << 40, 64, 7)
    )
    assert all(same(whole, other) for other in others)


def test_magmax_is_argmax_idempotent_and_ordered_only_among_equals() -> None:
    vectors = random_vectors(coarse=True, experts=5)
    result = merged(MagMax(1.0), vectors)
    for key, deltas in stacked(vectors).items():
        latest = deltas.flip(0)  # argmax takes the first among equals
        if deltas[0].numel():
            assert torch.equal(result[key], latest.gather(0, latest.abs().argmax(0, keepdim=True))[0])
    vectors = random_vectors()
    once = merged(MagMax(1.0), vectors)["m"]
    assert torch.equal(merged(MagMax(1.0), vectors_of(once, once))["w"], once)
    assert torch.equal(merged(MagMax(1.0), reversed_order(vectors))["m"], once)


def test_consensus_against_the_formula_and_with_a_threshold_of_zero() -> None:
    vectors = random_vectors(experts=4, coarse=True)
    result = merged(Consensus(0.4, agree=2), vectors)
    for key, deltas in stacked(vectors).items():
        uses = deltas.abs() > 0.4 * (deltas.sum(0) - deltas).abs()
        torch.testing.assert_close(result[key], 0.3 * deltas.sum(0) * (uses.sum(0) >= 2))
    vectors = random_vectors()
    total = sum((vector["m"] for vector in vectors.vectors.values()), torch.zeros(()))
    assert torch.equal(merged(Consensus(0.0, agree=3, scale=1.0), vectors)["m"], total)


def _naive(delta: torch.Tensor, density: float, gamma: float) -> torch.Tensor:
    if density >= 1:
        return delta
    n = delta.numel()
    target, top = int(density * n), int(gamma * n)
    bottom = max(0, n - target - top)
    mask = torch.zeros(n)
    mask[delta.abs().flatten().argsort()[bottom : bottom + target]] = 1
    return delta * mask.reshape(delta.shape)


@pytest.mark.parametrize("density", [0.01, 0.5, 0.9, 0.995, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.01, 0.2])
def test_breadcrumbs_against_sorting(density: float, gamma: float) -> None:
    vectors = random_vectors()
    result = merged(Breadcrumbs(density, gamma, (0.1, 0.2, 0.3)), vectors)
    for key, deltas in stacked(vectors).items():
        kept = [_naive(delta, density, gamma) * w for delta, w in zip(deltas, (0.1, 0.2, 0.3), strict=True)]
        torch.testing.assert_close(result[key], torch.stack(kept).sum(0), rtol=1e-6, atol=1e-9)


def test_model_stock_against_the_formula() -> None:
    experts = [normal(20, 30, scale=1.0) + normal(20, 30, seed=seed, scale=1.0) for seed in range(1, 5)]
    pairs = [torch.cosine_similarity(a.flatten(), b.flatten(), dim=0) for a, b in combinations(experts, 2)]
    cos = float(torch.stack(pairs).mean())
    expected = 4 * cos / (1 + 3 * cos) * torch.stack(experts).mean(0)
    torch.testing.assert_close(merged(ModelStock(), vectors_of(*experts))["w"], expected)


BASE, FIRST, SECOND = normal(3, 6, 7, scale=1.0)


@pytest.mark.parametrize("t", [0.0, 0.3, 0.5, 1.0])
def test_slerp_against_the_definition(t: float) -> None:
    a, b = FIRST.double(), SECOND.double()
    w = math.acos(float((a * b).sum() / (a.norm() * b.norm())))
    expected = (math.sin((1 - t) * w) * a + math.sin(t * w) * b) / math.sin(w)
    result = BASE + merged(Slerp(t), vectors_of(FIRST - BASE, SECOND - BASE, base={"w": BASE}))["w"]
    torch.testing.assert_close(result, expected.float(), rtol=1e-5, atol=1e-6)


def test_the_ends_of_slerp_are_the_experts_and_nearly_parallel_weights_are_interpolated_linearly() -> None:
    vectors = vectors_of(FIRST, SECOND, base={"w": BASE})
    assert torch.equal(merged(Slerp(0.0), vectors)["w"], vectors.vectors["a"]["w"])
    assert torch.equal(merged(Slerp(1.0), vectors)["w"], vectors.vectors["b"]["w"])
    vectors = vectors_of(FIRST * 1e-3, SECOND * 1e-3, base={"w": BASE})
    first, second = (vector["w"] for vector in vectors.vectors.values())
    torch.testing.assert_close(merged(Slerp(0.25), vectors)["w"], 0.75 * first + 0.25 * second)


def test_the_default_is_the_papers_and_of_one_tensor_all_trims_are_the_same() -> None:
    vectors = vectors_of(*normal(3, 400))
    assert same(merged(ties_per_tensor(), vectors), merged(ties(), vectors))
    one = vectors_of(normal(300))
    assert same(merged(Breadcrumbs(0.3, 0.0, 1.0), one), merged(ties_per_tensor(0.3), one))
    assert Ties() == ties()


def test_a_sum_is_a_mean_times_those_that_agree() -> None:
    vectors = random_vectors()
    means, sums = merged(ties(0.5), vectors), merged(ties_sum(0.5, scale=1.0), vectors)
    ratio = torch.cat([(sums[key] / means[key]).flatten() for key in sums])
    ratio = ratio[~ratio.isnan()]
    torch.testing.assert_close(ratio, ratio.round())
    assert set(ratio.round().tolist()) == {1.0, 2.0, 3.0}


def test_entries_are_dropped_or_enlarged_without_bias_over_seeds() -> None:
    result = merged(Dare(density=0.25, scale=0.5), vectors_of([1.0] * 4000))["w"]
    assert set(result.tolist()) == {0.0, 2.0}
    assert abs(float((result > 0).float().mean()) - 0.25) < 0.03
    vectors = vectors_of([1.0, -2.0, 0.5], [3.0, 0.1, -0.5])
    mean = sum(merged(dare(0.5, 1.0, seed), vectors)["w"] for seed in range(500)) / 500
    # The standard error of entry j is |(tau_1j, tau_2j)| / sqrt(500).
    errors = torch.tensor([10.0, 4.01, 0.5]).sqrt() / 500**0.5
    assert bool(((mean - torch.tensor([4.0, -1.9, 0.0])).abs() < 4 * errors).all())


def test_without_dropping_it_is_task_arithmetic_or_ties_and_the_order_does_not_matter() -> None:
    vectors = random_vectors()
    assert same(merged(dare(0.0, (0.1, 0.2, 0.3)), vectors), merged(TaskArithmetic((0.1, 0.2, 0.3)), vectors))
    assert same(merged(dare_ties(0.0, 0.3), vectors), merged(ties_sum(0.3, 0.5), vectors))
    vectors = vectors_of(*normal(2, 50))
    torch.testing.assert_close(merged(Dare(), vectors)["w"], merged(Dare(), reversed_order(vectors))["w"])


def test_the_norm_of_each_tensor_is_restored() -> None:
    vectors = random_vectors(experts=1)
    for key, delta in merged(dare_mergekit(0.5), vectors).items():
        if delta.any():
            torch.testing.assert_close(delta.abs().sum(), vectors.vectors["a"][key].abs().sum())


@pytest.mark.parametrize(
    "method",
    [dare(), dare_mergekit(), dare_ties_mergekit(), dare_ties(density=1.0), ties(1.0), ties_per_tensor(1.0)],
    ids=repr,
)
def test_nothing_is_read_before_the_merge_when_norms_and_thresholds_are_not_needed(
    method: Dare | Ties, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = vectors_of([1.0], [2.0])
    monkeypatch.setattr(TaskVectors, "block", lambda *_: pytest.fail("was read"))
    method.survey(vectors)


def _makers(option: str) -> list[Callable[..., Any]]:
    """Everything that has an option: rows, and the classes with every choice open."""
    makers: list[Callable[..., Any]] = [Ties, Dare, *(maker_of(METHODS[name]) for name in ELEMENT)]
    return [maker for maker in makers if option in schema(maker)]


VALUES: list[tuple[str, tuple[Any, ...], str]] = [
    ("density", (0.0, -0.1, 1.01, float("nan")), r"'density' must be in \(0, 1\], got"),
    ("drop", (1.0, -0.1), r"'drop' must be in \[0, 1\), got"),
    ("gamma", (1.0, -0.1), r"'gamma' must be in \[0, 1\), got"),
    ("t", (1.1, -0.1), r"'t' must be in \[0, 1\], got"),
    ("agree", (0,), "'agree' must be at least 1, got 0"),
    ("scale", (float("inf"),), "'scale' must be a finite number, got inf"),
    ("weights", ((1.0, float("nan")),), "'weights' must be a finite number, got nan"),
    ("threshold", (float("nan"),), "'threshold' must be a finite number"),
]
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (maker, {option: value}, message)
    for option, values, message in VALUES
    for maker in _makers(option)
    for value in values
]
REFUSED += [
    (ties_fusionbench, {"merge": "means"}, "'merge' must be sum, mean or max, got 'means'; did you mean 'mean'"),
    (Ties, {"trim": "means"}, "'trim' must be model or tensor, got 'means'"),
    (Ties, {"weigh": "after", "merge": "max"}, "'merge' must be 'mean' where 'weigh' is 'after', got 'max'"),
    (Dare, {"elect": "yes"}, "'elect' must be no, weighted or unweighted, got 'yes'"),
    (Dare, {"elect": "unweighted", "normalize": True}, "'normalize' must be false where 'elect' is 'unweighted'"),
]


@pytest.mark.parametrize(("maker", "options", "message"), REFUSED)
def test_options_that_are_refused(maker: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        maker(**options)


PER_EXPERT = [
    (maker, option)
    for option in ("weights", "scale", "threshold")
    for maker in _makers(option)
    if tuple[float, ...] in get_args(schema(maker)[option][0])
]


@pytest.mark.parametrize(("maker", "option"), PER_EXPERT)
def test_one_number_for_three_experts_is_refused(maker: Callable[..., Any], option: str) -> None:
    method = maker(**{option: (1.0,)}, **({"agree": 1} if maker is Consensus else {}))
    with pytest.raises(RecipeError, match="must be one number or 3, got 1; give one, or one per expert"):
        merged(method, random_vectors())


@pytest.mark.parametrize(
    ("method", "count", "message"),
    [
        (Consensus(agree=3), 2, r"'agree' is 3, but there are 2 experts: .* set it to at most 2"),
        (ModelStock(), 1, "'model_stock' merges at least 2 experts, got 1"),
        (Slerp(), 1, "slerp merges exactly 2 experts, got 1"),
        (Slerp(), 3, "slerp merges exactly 2 experts, got 3"),
    ],
)
def test_numbers_of_experts_that_are_refused(method: Any, count: int, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        merged(method, vectors_of(*[[1.0]] * count))
