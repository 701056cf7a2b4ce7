"""PEFT's DARE, with and without an election, against PEFT with the same draws."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from orthomerge.merging.dare_peft import DarePeft
from orthomerge.merging.dare_ties_peft import DareTiesPeft
from orthomerge.merging.kinds import Site
from orthomerge.merging.random import keep_mask
from orthomerge.merging.vectors import TaskVectors

Merge = Callable[..., dict[str, torch.Tensor]]
Make = Callable[..., TaskVectors]


@pytest.mark.parametrize(("kind", "name"), [(DarePeft, "dare_linear"), (DareTiesPeft, "dare_ties")])
@pytest.mark.parametrize("density", [0.3, 0.9])
@pytest.mark.parametrize("weights", [None, (0.5, 0.2, 0.3), (1.0, -0.5, 2.0)])
def test_against_peft(
    kind: type[DarePeft | DareTiesPeft],
    name: str,
    density: float,
    weights: tuple[float, ...] | None,
    random_vectors: Make,
    merged: Merge,
    stacked: Merge,
    peft_merging: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vectors = random_vectors()
    result = merged(kind(density, weights, seed=7), vectors)
    for key, deltas in stacked(vectors).items():
        site = Site(key, vectors.shapes[key], 0, vectors.tasks)
        masks = iter(
            keep_mask(site, task, deltas[0].numel(), keep=density, seed=7).float().reshape(deltas[0].shape)
            for task in vectors.tasks
        )
        with monkeypatch.context() as patch:
            patch.setattr(torch, "bernoulli", lambda _, masks=masks: next(masks))
            expected = getattr(peft_merging, name)(list(deltas), torch.tensor(weights or (1.0,) * 3), density)
        torch.testing.assert_close(result[key], expected, rtol=1e-6, atol=1e-8)
