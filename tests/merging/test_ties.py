"""TIES: what its entries give by hand; other implementations are in `test_references`."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

from orthomerge.core.errors import RecipeError
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

Merge = Callable[..., dict[str, torch.Tensor]]
Make = Callable[..., TaskVectors]
Kind = Literal["sum", "mean", "max"]


def test_by_hand(vectors_of: Make, merged: Merge) -> None:
    # The two largest of five stay:  [4, -3, 0, 0, 0]  [-5, 0, 3, 0, 0]  [0, -9, 7, 0, 0]
    vectors = vectors_of([4, -3, 1, 0, 2], [-5, 1, 3, 0, -0.5], [-1, -9, 7, 0, 0])
    # Sums -1, -12, 10: the four loses against the five.
    assert merged(Ties(density=0.4, scale=2.0), vectors)["w"].tolist() == [-10, -12, 10, 0, 0]
    assert merged(ties_sum(0.4, scale=0.5), vectors)["w"].tolist() == [-2.5, -6, 5, 0, 0]


def test_the_default_is_the_papers() -> None:
    assert Ties() == ties()


def test_the_trim_is_over_the_whole_vector(vectors_of: Make, merged: Merge) -> None:
    vectors = vectors_of({"large": [5.0, -4.0], "small": [1.0, 2.0]})
    result = merged(ties(0.5), vectors)
    assert result["large"].tolist() == [5, -4]
    assert result["small"].tolist() == [0, 0]


def test_the_trim_is_per_tensor(vectors_of: Make, merged: Merge) -> None:
    vectors = vectors_of({"large": [5, -4], "small": [1, 2]}, {"large": [1, -8], "small": [-1, 4]})
    result = merged(ties_per_tensor(0.5), vectors)
    assert result["large"].tolist() == [5, -8]
    assert result["small"].tolist() == [0, 3]


def test_of_one_tensor_both_trims_are_the_same(vectors_of: Make, merged: Merge) -> None:
    experts = torch.randn(3, 400, generator=torch.Generator().manual_seed(0))
    vectors = vectors_of(*experts)
    assert torch.equal(merged(ties_per_tensor(), vectors)["w"], merged(ties(), vectors)["w"])


def test_ties_at_the_threshold_all_survive(vectors_of: Make, merged: Merge) -> None:
    assert merged(ties(0.25), vectors_of([1, -1, 1, 0.5]))["w"].tolist() == [1, -1, 1, 0]


def test_entries_that_cancel_elect_plus(vectors_of: Make, merged: Merge) -> None:
    assert merged(ties(1.0), vectors_of([2, -3], [-2, 3]))["w"].tolist() == [2, 3]


def test_a_density_below_one_entry_keeps_nothing(vectors_of: Make, merged: Merge) -> None:
    assert merged(ties(0.3), vectors_of([2, -3, 1]))["w"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("trim", ["model", "tensor"])
def test_nothing_is_read_before_the_merge_at_density_one(
    trim: Any, vectors_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = vectors_of([1.0], [2.0])
    monkeypatch.setattr(TaskVectors, "block", lambda *_: pytest.fail("was read"))
    Ties(density=1.0, trim=trim).survey(vectors)


def test_a_sum_is_a_mean_times_those_that_agree(random_vectors: Make, merged: Merge) -> None:
    vectors = random_vectors()
    means, sums = merged(ties(0.5), vectors), merged(ties_sum(0.5, scale=1.0), vectors)
    ratio = torch.cat([(sums[key] / means[key]).flatten() for key in sums])
    ratio = ratio[~ratio.isnan()]
    torch.testing.assert_close(ratio, ratio.round())
    assert set(ratio.round().tolist()) == {1.0, 2.0, 3.0}


def test_mergekit_the_weights_decide_the_sign(vectors_of: Make, merged: Merge) -> None:
    vectors = vectors_of([4, 1, -2], [-3, 2, -1])
    # Weighted: [0.4, 0.1, -0.2] and [-2.7, 1.8, -0.9]: the lighter expert loses its four.
    result = merged(ties_mergekit(weights=(0.1, 0.9)), vectors)["w"]
    torch.testing.assert_close(result, torch.tensor([-3.0, 1.9, -1.1]))
    plain = merged(ties_mergekit(weights=(0.1, 0.9), normalize=False, scale=2.0), vectors)["w"]
    torch.testing.assert_close(plain, torch.tensor([-5.4, 3.8, -2.2]))


def test_mergekit_keeps_one_entry_however_small_the_density(vectors_of: Make, merged: Merge) -> None:
    assert merged(ties_mergekit(0.01), vectors_of([1, -3, 2]))["w"].tolist() == [0, -3, 0]


def test_mergekit_weights_that_cancel_are_not_divided_by(vectors_of: Make, merged: Merge) -> None:
    assert merged(ties_mergekit(weights=(1.0, -1.0)), vectors_of([2.0], [-3.0]))["w"].tolist() == [5.0]


def test_peft_elects_before_it_weighs(vectors_of: Make, merged: Merge) -> None:
    vectors = vectors_of([4, 1, -2], [-3, 2, -1])
    # The sums 1, 3, -3 elect +, +, -; then the weights; then half where both agree.
    result = merged(ties_peft(1.0, (0.1, 0.9)), vectors)["w"]
    torch.testing.assert_close(result, torch.tensor([0.4, 0.95, -0.55]))


def test_fusionbench_keeps_one_entry_more_than_the_paper(vectors_of: Make, merged: Merge) -> None:
    result = merged(ties_fusionbench(0.4, scale=1.0), vectors_of([5, -4, 3, 2, 1]))["w"]
    assert result.tolist() == [5, -4, 3, 0, 0]


@pytest.mark.parametrize(("kind", "expected"), [("sum", [-6, -3, 4]), ("mean", [-3, -3, 2]), ("max", [-4, -3, 3])])
def test_fusionbench_by_hand(kind: Kind, expected: list[float], vectors_of: Make, merged: Merge) -> None:
    # Sums -6, 0, 4, 0 ... with three minus and one plus elsewhere: the draw goes to minus.
    vectors = vectors_of({"w": [-2, 3, 1], "v": [-1, -1]}, {"w": [-4, -3, 3], "v": [-1, 0]})
    assert merged(ties_fusionbench(1.0, scale=1.0, merge=kind), vectors)["w"].tolist() == expected


@pytest.mark.parametrize(("kind", "expected"), [("sum", -3), ("mean", -3), ("max", 0)])
def test_fusionbench_when_the_majority_is_a_draw_too(
    kind: Kind, expected: float, vectors_of: Make, merged: Merge
) -> None:
    vectors = vectors_of([3, 1, -1], [-3, 1, -1])
    assert merged(ties_fusionbench(1.0, scale=1.0, merge=kind), vectors)["w"][0] == expected


def test_unknown_choices_are_refused() -> None:
    wrong: Any = "means"
    with pytest.raises(RecipeError, match="'merge' must be sum, mean or max, got 'means'; did you mean 'mean'"):
        ties_fusionbench(merge=wrong)
    with pytest.raises(RecipeError, match="'trim' must be model or tensor, got 'means'"):
        Ties(trim=wrong)
    with pytest.raises(RecipeError, match="'merge' must be 'mean' where 'weigh' is 'after', got 'max'"):
        Ties(weigh="after", merge="max")
