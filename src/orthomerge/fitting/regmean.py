"""RegMean: every linear layer as the one that comes nearest to all experts' outputs on their own inputs.

Jin et al., "Dataless Knowledge Fusion by Merging Weights of Language Models", 2023, arXiv 2212.09849.

Per linear layer, W minimises sum_t E_x ||W x - W_t x||^2 over the inputs x that it has in expert t on task t:

    (sum_t G_t) W^T = sum_t G_t W_t^T,    G_t = E x x^T with everything off the diagonal times `alpha`.

Letters: T experts; W, W_t [m, k]; G_t [k, k]; see `grams` for which weights are linear layers and which rows count.
Everything else is averaged: biases, norms, embeddings, convolutions, and linear layers that are never called.
Differs from the paper: padded positions do not count. Solved in float64 for the difference to the average, so that a
direction that no expert's inputs have keeps the average. `alpha` is FusionBench's; the paper's code has 0.1 or 0.9.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch

from orthomerge.core.errors import NumericalError
from orthomerge.fitting.drawing import at_least_one, drawn, mean_expert
from orthomerge.fitting.grams import called, grams, least_squares, shrunk
from orthomerge.fitting.kinds import Fitted
from orthomerge.merging.options import fraction

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orthomerge.fitting.kinds import Setting


@dataclass(frozen=True)
class RegMean:
    """`alpha`: what is left of the correlations between inputs; at 0 every input weighs for itself.

    `inputs`: how many of each task are looked at, drawn by the seed.
    """

    alpha: float = 0.95
    inputs: int = 256

    def __post_init__(self) -> None:
        fraction("alpha", self.alpha, zero=True)
        at_least_one("inputs", self.inputs)

    def fit(self, setting: Setting) -> Fitted:
        few = drawn(setting, self.inputs)
        called(setting, few)  # refuses an encoder without linear layers before any work is done
        weights = mean_expert(setting)
        equations = Equations(dict(setting.layout.views(weights)), self.alpha)
        for task in setting.tasks:
            setting.say(f"inputs of every layer: {task}")
            expert = setting.tuned(task)
            setting.encoder.load(expert)
            equations.add(grams(setting, few, task), dict(setting.layout.views(expert)))
        found = equations.solve()
        return Fitted(weights, setting.heads, conditions(found, len(setting.layout.shapes)))


class Equations:
    """The normal equations of some layers, for the difference to the average. `average`: views that `solve` fills."""

    def __init__(self, average: Mapping[str, torch.Tensor], alpha: float) -> None:
        self._average, self._alpha = average, alpha
        self._totals: dict[str, torch.Tensor] = {}
        self._moments: dict[str, torch.Tensor] = {}

    def add(self, seen: Mapping[str, torch.Tensor], expert: Mapping[str, torch.Tensor]) -> None:
        """An expert's G of each layer, and its weights by name."""
        for name, gram in seen.items():
            G = shrunk(gram, self._alpha)
            change = (expert[name] - self._average[name]).to(G.device).double()
            moment = G @ change.T
            self._totals[name] = self._totals[name].add_(G) if name in self._totals else G
            self._moments[name] = self._moments[name].add_(moment) if name in self._moments else moment

    def solve(self) -> dict[str, float]:
        """Write every layer's weight; the condition numbers, by name."""
        found = {}
        for name, total in self._totals.items():
            change, found[name] = least_squares(total, self._moments[name])
            if not torch.isfinite(change).all():
                raise NumericalError(f"the equations of {name!r} have no finite solution; lower 'alpha'")
            self._average[name].add_(change.T.float().cpu())
        return found


def conditions(found: Mapping[str, float], tensors: int) -> dict[str, object]:
    """Condition numbers as facts: how many of so many tensors were solved for, and how well they could be."""
    finite = [number for number in found.values() if number != float("inf")]
    facts: dict[str, object] = {
        "layers": len(found),
        "averaged": tensors - len(found),
        "singular": len(found) - len(finite),
    }
    if finite:
        facts |= {"condition": median(finite), "worst": max(finite)}
    return facts
