"""DARE: nothing dropped is task arithmetic, on average nothing changes; other implementations: `test_references`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from orthomerge.core.errors import RecipeError
from orthomerge.merging.dare import Dare, dare, dare_mergekit, dare_ties, dare_ties_mergekit
from orthomerge.merging.elements import TaskArithmetic
from orthomerge.merging.ties import ties_sum
from orthomerge.merging.vectors import TaskVectors

Merge = Callable[..., dict[str, torch.Tensor]]
Make = Callable[..., TaskVectors]


def test_entries_are_dropped_or_enlarged(vectors_of: Make, merged: Merge) -> None:
    result = merged(Dare(density=0.25, scale=0.5), vectors_of([1.0] * 4000))["w"]
    assert set(result.tolist()) == {0.0, 2.0}
    assert abs(float((result > 0).float().mean()) - 0.25) < 0.03


def test_without_dropping_it_is_task_arithmetic(random_vectors: Make, merged: Merge) -> None:
    vectors = random_vectors()
    expected = merged(TaskArithmetic((0.1, 0.2, 0.3)), vectors)
    for key, delta in merged(dare(0.0, (0.1, 0.2, 0.3)), vectors).items():
        assert torch.equal(delta, expected[key])


def test_without_dropping_the_election_is_that_of_ties(random_vectors: Make, merged: Merge) -> None:
    vectors = random_vectors()
    expected = merged(ties_sum(0.3, 0.5), vectors)
    for key, delta in merged(dare_ties(0.0, 0.3), vectors).items():
        assert torch.equal(delta, expected[key])


def test_unbiased_over_seeds(vectors_of: Make, merged: Merge) -> None:
    vectors = vectors_of([1.0, -2.0, 0.5], [3.0, 0.1, -0.5])
    mean = sum(merged(dare(0.5, 1.0, seed), vectors)["w"] for seed in range(500)) / 500
    expected = torch.tensor([4.0, -1.9, 0.0])
    # The standard error of entry j is |(tau_1j, tau_2j)| / sqrt(500).
    errors = torch.tensor([10.0, 4.01, 0.5]).sqrt() / 500**0.5
    assert bool(((mean - expected).abs() < 4 * errors).all())


def test_the_draws_belong_to_the_expert_not_to_its_place(vectors_of: Make, merged: Merge) -> None:
    vectors = vectors_of(*torch.randn(2, 50, generator=torch.Generator().manual_seed(0)))
    swapped = TaskVectors(dict(reversed(list(vectors.vectors.items()))))
    torch.testing.assert_close(merged(Dare(), vectors)["w"], merged(Dare(), swapped)["w"])


def test_the_norm_of_each_tensor_is_restored(random_vectors: Make, merged: Merge) -> None:
    vectors = random_vectors(experts=1)
    for key, delta in merged(dare_mergekit(0.5), vectors).items():
        if delta.any():
            norm = vectors.vectors["a"][key].abs().sum()
            torch.testing.assert_close(delta.abs().sum(), norm)


@pytest.mark.parametrize("method", [dare(), dare_mergekit(), dare_ties_mergekit(), dare_ties(density=1.0)], ids=repr)
def test_nothing_is_read_before_the_merge_when_norms_and_thresholds_are_not_needed(
    method: Dare, vectors_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = vectors_of([1.0], [2.0])
    monkeypatch.setattr(TaskVectors, "block", lambda *_: pytest.fail("was read"))
    method.survey(vectors)


def test_choices_that_exclude_each_other_or_do_not_exist_are_refused() -> None:
    wrong: Any = "yes"
    with pytest.raises(RecipeError, match="'elect' must be no, weighted or unweighted, got 'yes'"):
        Dare(elect=wrong)
    with pytest.raises(RecipeError, match="'normalize' must be false where 'elect' is 'unweighted'"):
        Dare(elect="unweighted", normalize=True)
