"""What holds for every method that merges element by element."""

from collections.abc import Callable

import pytest
import torch

from orthomerge.core.errors import RecipeError
from orthomerge.merging.breadcrumbs import Breadcrumbs
from orthomerge.merging.consensus import Consensus
from orthomerge.merging.dare import (
    Dare,
    dare,
    dare_mergekit,
    dare_peft,
    dare_ties,
    dare_ties_mergekit,
    dare_ties_peft,
)
from orthomerge.merging.kinds import SurveyMethod, TensorMethod
from orthomerge.merging.magmax import MagMax
from orthomerge.merging.model_stock import ModelStock
from orthomerge.merging.slerp import Slerp
from orthomerge.merging.ties import (
    Ties,
    ties,
    ties_fusionbench,
    ties_mergekit,
    ties_peft,
    ties_per_tensor,
    ties_sum,
)
from orthomerge.merging.vectors import TaskVectors

Method = TensorMethod | SurveyMethod
Merge = Callable[[Method, TaskVectors], dict[str, torch.Tensor]]

METHODS: list[Method] = [
    ties(),
    ties(density=1.0),
    ties_sum(),
    ties_per_tensor(),
    ties_mergekit(0.4, (0.5, 0.2, 0.9)),
    ties_peft(0.3, (0.5, -0.2, 0.9)),
    ties_fusionbench(),
    ties_fusionbench(merge="mean"),
    ties_fusionbench(merge="max"),
    dare(0.3, (0.1, 0.2, 0.3)),
    dare_ties(),
    dare_mergekit(0.6, normalize=True),
    dare_ties_mergekit(0.6, (0.5, 0.2, 0.9), normalize=True),
    dare_peft(),
    dare_ties_peft(),
    Breadcrumbs(0.5, 0.1, (0.1, 0.2, 0.3)),
    MagMax(),
    ModelStock(),
    Slerp(0.3),
    Consensus((0.2, 0.4, 0.6)),
]

# Each returns a single expert unchanged.
FAITHFUL: list[Method] = [
    ties(1.0),
    ties_sum(1.0, scale=1.0),
    ties_per_tensor(1.0),
    ties_mergekit(),
    ties_peft(1.0),
    ties_fusionbench(1.0, scale=1.0),
    ties_fusionbench(1.0, scale=1.0, merge="mean"),
    ties_fusionbench(1.0, scale=1.0, merge="max"),
    dare(0.0, 1.0),
    dare_ties(0.0, 1.0, 1.0),
    dare_mergekit(),
    dare_ties_mergekit(),
    dare_peft(1.0),
    dare_ties_peft(1.0),
    Breadcrumbs(1.0, scale=1.0),
    MagMax(1.0),
    Consensus(agree=1, scale=1.0),
]

WEIGHTED: list[Method] = [
    ties_mergekit(weights=(1.0,)),
    ties_peft(weights=(1.0,)),
    dare(scale=(1.0,)),
    dare_mergekit(weights=(1.0,)),
    dare_ties_mergekit(weights=(1.0,)),
    dare_peft(weights=(1.0,)),
    dare_ties_peft(weights=(1.0,)),
    Breadcrumbs(scale=(1.0,)),
    Consensus(threshold=(1.0,)),
]


def _experts(method: Method) -> int:
    return 2 if isinstance(method, Slerp) else 3


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_the_size_of_blocks_changes_no_bit(
    method: Method,
    coarse: bool,
    random_vectors: Callable[..., TaskVectors],
    merged: Merge,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("orthomerge.merging.statistics._RUN", 50)  # cuts across all blocks
    whole, *others = (
        merged(method, random_vectors(tile=tile, coarse=coarse, experts=_experts(method))) for tile in (1 << 40, 64, 7)
    )
    for other in others:
        assert other.keys() == whole.keys()
        for key, delta in whole.items():
            assert torch.equal(delta, other[key]), key


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_zero_deltas_give_the_base(method: Method, vectors_of: Callable[..., TaskVectors], merged: Merge) -> None:
    base = {"w": torch.randn(5, 4), "empty": torch.empty(0)}
    zero = {key: torch.zeros_like(tensor) for key, tensor in base.items()}
    result = merged(method, vectors_of(*[zero] * _experts(method), base=base))
    assert not result["w"].any()


@pytest.mark.parametrize("method", FAITHFUL, ids=repr)
def test_one_expert_comes_back(method: Method, random_vectors: Callable[..., TaskVectors], merged: Merge) -> None:
    vectors = random_vectors(experts=1)
    result = merged(method, vectors)
    assert all(torch.equal(delta, vectors.vectors["a"][key]) for key, delta in result.items())


@pytest.mark.parametrize("method", WEIGHTED, ids=repr)
def test_one_number_for_three_experts_is_refused(
    method: Method, random_vectors: Callable[..., TaskVectors], merged: Merge
) -> None:
    if isinstance(method, Consensus):
        method = Consensus(threshold=(1.0,), agree=1)
    with pytest.raises(RecipeError, match="1 numbers were given for 3 experts; give one, or one each"):
        merged(method, random_vectors())


@pytest.mark.parametrize(
    "method",
    [
        Ties,
        ties,
        ties_sum,
        ties_per_tensor,
        ties_mergekit,
        ties_peft,
        ties_fusionbench,
        Dare,
        dare_ties,
        dare_mergekit,
        dare_ties_mergekit,
        dare_peft,
        dare_ties_peft,
        Breadcrumbs,
    ],
)
@pytest.mark.parametrize("density", [0.0, -0.1, 1.01, float("nan")])
def test_density_is_a_share(method: Callable[..., Method], density: float) -> None:
    with pytest.raises(RecipeError, match=r"'density' must be in \(0, 1\], got"):
        method(density=density)


@pytest.mark.parametrize(
    "method",
    [
        Ties,
        ties,
        ties_sum,
        ties_per_tensor,
        ties_mergekit,
        ties_fusionbench,
        Dare,
        dare,
        dare_ties,
        dare_mergekit,
        dare_ties_mergekit,
        Breadcrumbs,
        MagMax,
        Consensus,
    ],
)
def test_scale_is_finite(method: Callable[..., Method]) -> None:
    with pytest.raises(RecipeError, match="'scale' must be a finite number, got inf"):
        method(scale=float("inf"))


@pytest.mark.parametrize(
    "method", [ties_mergekit, ties_peft, dare_mergekit, dare_ties_mergekit, dare_peft, dare_ties_peft]
)
def test_weights_are_finite(method: Callable[..., Method]) -> None:
    with pytest.raises(RecipeError, match="'weights' must be a finite number, got nan"):
        method(weights=(1.0, float("nan")))
