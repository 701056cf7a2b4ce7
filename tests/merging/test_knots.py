"""KnOTS: theorems (linear mergers, planted bases), the authors' steps written out, factors against dense, refusals."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.merging.making import Products, merged, random_vectors, vectors_of

from orthomerge.core.errors import RecipeError
from orthomerge.merging import knots
from orthomerge.merging.knots import Knots, Parts
from orthomerge.merging.methods import make_method
from orthomerge.merging.vectors import InMemory, TaskVector, TaskVectors

SHAPES: dict[str, tuple[int, ...]] = {"q": (12, 9), "up": (20, 6), "down": (6, 20), "bias": (7,), "conv": (4, 3, 2)}
RANKS = (2, 1, 3)  # each expert has its own


def experts(*, thin: bool = True, ranks: Sequence[int] = RANKS, mute: bool = False, seed: int = 0) -> TaskVectors:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    base = InMemory({key: torch.zeros(shape) for key, shape in SHAPES.items()})
    found = {}
    for name, rank in zip("abcdef", ranks, strict=False):
        pairs = {key: (draw(m, rank), draw(rank, k)) for key, (m, k) in list(SHAPES.items())[:3]}
        found[name] = TaskVector(base, ((1.0, Products(pairs, thin, mute)),))
    return TaskVectors(found)


def make(merger: str, count: int = 3, **options: Any) -> Any:
    return make_method("knots", {"merger": merger, **options}, tasks=tuple("abcdef"[:count]))


def near(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], *, share: float = 1e-5) -> bool:
    return all(float((one[key] - other[key]).norm()) <= share * float(other[key].norm()) for key in other)


@pytest.mark.parametrize("thin", [True, False])
@pytest.mark.parametrize(
    ("merger", "options"),
    [("task_arithmetic", {"scale": (0.3, 0.7, -1.1)}), ("average", {}), ("dare", {"drop": 0.0, "scale": 0.4})],
)
def test_what_is_linear_gives_the_same_with_knots(thin: bool, merger: str, options: Any) -> None:
    vectors = experts(thin=thin)
    alone: Any = make_method(merger, options, tasks=("a", "b", "c"))
    assert near(merged(make(merger, **options), vectors), merged(alone, vectors))


def test_full_experts_lose_nothing() -> None:
    vectors = random_vectors()
    alone: Any = make_method("task_arithmetic", {"scale": 0.3}, tasks=("a", "b", "c"))
    assert near(merged(make("task_arithmetic", scale=0.3), vectors), merged(alone, vectors))


@pytest.mark.parametrize("merger", ["ties", "ties_sum", "ties_per_tensor", "ties@peft", "magmax"])
def test_factors_and_dense_updates_give_the_same(merger: str) -> None:
    options: dict[str, Any] = {} if merger == "magmax" else {"density": 0.37}
    thin, dense = (merged(make(merger, **options), experts(thin=thin)) for thin in (True, False))
    assert near(thin, dense, share=1e-4)


def test_a_planted_basis_by_hand() -> None:
    """M_t = Q D_t, the rows of [D_1 D_2] orthogonal: U is Q up to signs, and TIES works on the D_t."""
    Q = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(3))).Q
    one = torch.tensor([[6.0, 5.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    two = torch.tensor([[4.0, -1.0, 0.0], [0.0, 0.0, 3.0], [0.0, 0.0, 0.0]])
    # Trimmed to int(0.4 * 9) = 3 entries, all that there are; signs by sum: +, +, +, +; means of those that agree.
    expected = torch.tensor([[5.0, 5.0, 0.0], [0.0, 0.0, 3.0], [0.0, 0.0, 1.0]])
    found = merged(make("ties", 2, density=0.4, scale=1.0), vectors_of(Q @ one, Q @ two))["w"]
    torch.testing.assert_close(found, Q @ expected, rtol=1e-5, atol=1e-5)
    plain: Any = make_method("ties", {"density": 0.4}, tasks=("a", "b"))
    assert not torch.allclose(merged(plain, vectors_of(Q @ one, Q @ two))["w"], found, atol=0.1)


def test_the_authors_steps_written_out() -> None:
    """gstoica27/KnOTS, task_merger.py: S V_t of all layers in one row, its top k, elect, disjoint mean, U times it."""
    density, scale, vectors = 0.3, 0.6, experts()
    bases, rows, widths = {}, [], {}
    for key in ("q", "up", "down"):
        U, S, Vh = torch.linalg.svd(torch.cat([v[key] for v in vectors.vectors.values()], 1).double())
        rank = int((S > 1e-5).sum())
        assert rank == min(sum(RANKS), SHAPES[key][0])
        sV = (S[:rank, None] * Vh[:rank]).float()
        bases[key], widths[key] = U[:, :rank], (rank, SHAPES[key][1])
        rows.append(torch.stack([part.reshape(-1) for part in sV.split(SHAPES[key][1], 1)]))
    flat = torch.cat([*rows, torch.zeros(3, 7 + 24)], 1)
    kept = flat * (flat.abs() >= flat.abs().topk(int(density * flat.shape[1]), 1).values[:, -1:])
    sign = torch.where(kept.sum(0) >= 0, 1.0, -1.0)
    agree = torch.where(kept * sign > 0, kept, 0)
    mean = scale * agree.sum(0) / (agree != 0).sum(0).clamp_min(1)
    found, start = merged(make("ties", density=density, scale=scale), vectors), 0
    for key, (rank, width) in widths.items():
        part = mean[start : start + rank * width].reshape(rank, width).double()
        torch.testing.assert_close(found[key], (bases[key] @ part).float(), rtol=1e-4, atol=1e-5)
        start += rank * width
    assert not found["bias"].any()


def test_rank_is_what_there_is_and_a_table_is_decomposed_on_the_side_of_its_features() -> None:
    twice = experts(ranks=(2, 2))
    a, b = twice.vectors["a"], twice.vectors["b"]
    deficient = TaskVectors({"a": a, "b": a * 2.0, "c": a + b})  # seven columns of factors, four directions
    assert Parts(deficient).shapes == {**SHAPES, "q": (4, 9), "up": (4, 6), "down": (4, 20)}
    nothing = TaskVectors({"a": a - a, "b": b * 0.0})
    assert Parts(nothing).shapes == {**SHAPES, "q": (0, 9), "up": (0, 6), "down": (0, 20)}
    for method in (make("dare_ties", 2), make("ties@peft", 2)):
        assert not any(tensor.any() for tensor in merged(method, nothing).values())
    tables = [{"embeddings.word.weight": torch.randn(40, 3)} for _ in range(2)]
    assert Parts(vectors_of(*tables)).shapes == {"embeddings.word.weight": (3, 40)}


def test_experts_may_adapt_different_tensors() -> None:
    vectors = experts(ranks=(2, 3))
    (_, first), (_, second) = (vector.terms[0] for vector in vectors.vectors.values())
    assert isinstance(first, Products)
    assert isinstance(second, Products)
    apart = TaskVectors(
        {
            "a": TaskVector(vectors.base, ((1.0, Products({"q": first.pairs["q"]})),)),
            "b": TaskVector(vectors.base, ((1.0, Products({"up": second.pairs["up"]})),)),
        }
    )
    found = merged(make("ties", 2, density=1.0, scale=1.0), apart)
    torch.testing.assert_close(found["q"], vectors.vectors["a"]["q"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["up"], vectors.vectors["b"]["up"], rtol=1e-4, atol=1e-5)
    assert not found["down"].any()


def test_bases_that_are_not_kept_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = merged(make("dare_ties"), experts())
    monkeypatch.setattr(knots, "_KEPT", 0)
    again = merged(make("dare_ties"), experts())
    assert all(torch.equal(kept[key], again[key]) for key in kept)


def test_a_sum_has_the_factors_of_both_and_the_survey_multiplies_none() -> None:
    vectors = experts(ranks=(2, 3)).vectors
    pair = (vectors["a"] - 0.5 * vectors["b"]).factors("q")
    assert pair is not None
    assert pair[0].shape == (12, 5)
    torch.testing.assert_close(pair[0] @ pair[1], vectors["a"]["q"] - 0.5 * vectors["b"]["q"], atol=1e-5, rtol=1e-5)
    assert experts(thin=False).factors("q") is None
    keys = ("q", "up", "down")
    assert [part.deltas.shape for part in Parts(experts(mute=True)).blocks(keys=keys)] == [
        (3, 6, 9),
        (3, 6, 6),
        (3, 6, 20),
    ]


@pytest.mark.parametrize(
    ("merger", "options", "message"),
    [
        ("average", {"scale": 0.3}, r"merger 'average' has no 'scale'; it has weights"),
        ("task_arithmetic", {"drop": 0.3}, r"merger 'task_arithmetic' has no 'drop'; it has scale"),
        ("ties", {"density": 2.0}, r"'density' must be in \(0, 1\], got 2"),
        ("tsv_m", {}, r"'merger' must be average \| .*, got 'tsv_m'"),
        ("ties", {"scale": [0.1, 0.2, 0.3]}, r"merger ties: 'scale' must be number"),
    ],
)
def test_options_that_are_refused(merger: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make(merger, **options)


def test_options_go_to_the_merger() -> None:
    assert Knots(merger="dare", seed=5).inner() == make_method("dare", {}, tasks=("a",), seed=5)
    by_task = make("task_arithmetic", scale={"c": 0.3, "a": 0.1, "b": 0.2})
    assert by_task.scale == (0.1, 0.2, 0.3)
