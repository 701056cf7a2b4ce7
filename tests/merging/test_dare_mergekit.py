"""mergekit's DARE, with and without an election, against its steps spelled out with the same masks."""

from collections.abc import Callable

import pytest
import torch

from orthomerge.merging.dare_mergekit import DareMergekit
from orthomerge.merging.dare_ties_mergekit import DareTiesMergekit
from orthomerge.merging.kinds import Site
from orthomerge.merging.random import keep_mask
from orthomerge.merging.vectors import TaskVectors

Merge = Callable[..., dict[str, torch.Tensor]]
Make = Callable[..., TaskVectors]
Dropping = DareMergekit | DareTiesMergekit


def _naive(site: Site, deltas: torch.Tensor, method: Dropping, weights: tuple[float, ...]) -> torch.Tensor:
    rows = []
    for task, delta, weight in zip(site.tasks, deltas, weights, strict=True):
        mask = keep_mask(site, task, delta.numel(), keep=method.density, seed=method.seed)
        masked = delta * mask.reshape(delta.shape)
        before, after = delta.abs().sum(), masked.abs().sum()
        if method.density < 1 and method.rescale and before >= 1e-7 and after >= 1e-7:
            masked = masked * (before / after)
        rows.append(masked * weight)
    stacked = torch.stack(rows)
    numbers = torch.tensor(weights).reshape(-1, *(1,) * (deltas.ndim - 1))
    if isinstance(method, DareTiesMergekit):
        agree = stacked.sign() == torch.where(stacked.sum(0) >= 0, 1.0, -1.0)
        result, divisor = (stacked * agree).sum(0), (numbers * agree).sum(0)
        divisor = torch.where(divisor == 0, 1, divisor)
    else:
        result, divisor = stacked.sum(0), numbers.sum(0)
        divisor = torch.where(divisor.abs() < 1e-8, 1, divisor)
    return method.scale * (result / divisor if method.normalize else result)


@pytest.mark.parametrize("kind", [DareMergekit, DareTiesMergekit])
@pytest.mark.parametrize("density", [0.2, 0.7, 1.0])
@pytest.mark.parametrize("weights", [None, (0.5, 0.2, 0.3), (1.0, -0.25, -0.75)])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("rescale", [True, False])
def test_against_its_steps(
    kind: type[Dropping],
    density: float,
    weights: tuple[float, ...] | None,
    normalize: bool,
    rescale: bool,
    random_vectors: Make,
    merged: Merge,
    stacked: Merge,
) -> None:
    method = kind(density, weights, normalize=normalize, rescale=rescale, seed=5, scale=0.7)
    vectors = random_vectors()
    result = merged(method, vectors)
    for key, deltas in stacked(vectors).items():
        if deltas[0].numel():
            site = Site(key, vectors.shapes[key], 0, vectors.tasks)
            expected = _naive(site, deltas, method, weights or (1.0,) * 3)
            torch.testing.assert_close(result[key], expected, rtol=2e-6, atol=1e-8)


def test_the_norm_of_each_tensor_is_restored(random_vectors: Make, merged: Merge) -> None:
    vectors = random_vectors(experts=1)
    for key, delta in merged(DareMergekit(0.5), vectors).items():
        if delta.any():
            norm = vectors.vectors["a"][key].abs().sum()
            torch.testing.assert_close(delta.abs().sum(), norm)


@pytest.mark.parametrize("kind", [DareMergekit, DareTiesMergekit])
def test_no_look_is_taken_when_all_stay(
    kind: type[Dropping], vectors_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = vectors_of([1.0], [2.0])
    monkeypatch.setattr(TaskVectors, "block", lambda *_: pytest.fail("was read"))
    kind().survey(vectors)
