"""RegMean: every linear layer as the one that comes nearest to all experts' outputs on their own inputs.

Jin et al., "Dataless Knowledge Fusion by Merging Weights of Language Models", 2023, arXiv 2212.09849.

Per linear layer, W minimises sum_t E_x ||W x - W_t x||^2 over the inputs x that it has in expert t on task t:

    (sum_t G_t) W^T = sum_t G_t W_t^T,    G_t = E x x^T with everything off the diagonal times `alpha`.

RegMean++: the same from the first block to the last, on inputs that the merged blocks below have made.

Nguyen et al., "RegMean++: Enhancing Effectiveness and Generalization of Regression Mean for Model Merging", 2025,
arXiv 2508.03121. Code: nthehai01/RegMean-plusplus.

The inputs x of block b in expert t are those of task t after the *merged* blocks below b, through expert t's own block
b. A block is what lies under the first number in a module's path (`encoder.layer.3`, `layers.3`); a linear layer
outside all of them (a pooler, a projection) is a block by itself. Blocks come in the order in which a forward pass
calls them.

Letters: T experts; W, W_t [m, k]; G_t [k, k]; see `grams` for which weights are linear layers and which rows count.
Everything else is averaged: biases, norms, embeddings, convolutions, and linear layers that are never called.
Differs from the papers: padded positions do not count. Solved in float64 for the difference to the average, so that a
direction that no expert's inputs have keeps the average. `alpha` is FusionBench's; RegMean's code has 0.1 or 0.9.
RegMean++'s code leaves layers outside the blocks averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch

from orthomerge.core.checks import at_least_one
from orthomerge.core.errors import NumericalError
from orthomerge.fitting.grams import called, grams, least_squares, linear_layers, shrunk
from orthomerge.fitting.setting import Fitted
from orthomerge.merging.options import fraction

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orthomerge.fitting.setting import Setting


@dataclass(frozen=True)
class RegMean:
    """`alpha`: what is left of the correlations between inputs; at 0 each feature is weighted by itself.

    `inputs`: how many of each task are looked at, drawn by the seed.
    """

    alpha: float = 0.95
    inputs: int = 256

    def __post_init__(self) -> None:
        fraction("alpha", self.alpha, zero=True)
        at_least_one(inputs=self.inputs)

    def fit(self, setting: Setting) -> Fitted:
        few = setting.drawn(self.inputs)
        called(setting, few)  # refuses an encoder without linear layers before any work is done
        weights = setting.mean_expert()
        equations = Equations(dict(setting.layout.views(weights)), self.alpha)
        for task in setting.tasks:
            setting.say(f"inputs of every layer: {task}")
            expert = setting.tuned(task)
            setting.encoder.load(expert)
            equations.add(grams(setting, few, task), dict(setting.layout.views(expert)))
        return Fitted(weights, setting.heads, _facts(equations.solve(), len(setting.layout.shapes)))


@dataclass(frozen=True)
class RegMeanPp(RegMean):
    """RegMean++. `alpha`: what is left of the correlations between inputs; at 0 each feature is weighted by itself.

    `inputs`: how many of each task are looked at, drawn by the seed.
    """

    def fit(self, setting: Setting) -> Fitted:
        few = setting.drawn(self.inputs)
        calls = called(setting, few)
        modules = linear_layers(setting.encoder.module)
        weights = setting.mean_expert()
        merged, places = dict(setting.layout.views(weights)), setting.layout.places
        blocks = tuple(dict.fromkeys(map(_block, calls)))
        conditions: dict[str, float] = {}
        for number, block in enumerate(blocks, 1):
            setting.say(f"block {number} of {len(blocks)}: {block}")
            layers = {name: modules[name] for name in calls if _block(name) == block}
            inside = [name for name in places if name.startswith(f"{block}.")]
            equations = Equations(merged, self.alpha)
            setting.encoder.load(weights)
            for task in setting.tasks:
                expert = setting.tuned(task)
                for name in inside:
                    setting.encoder.weights[places[name]] = expert[places[name]].to(setting.device)
                seen = grams(setting, few, task, layers=layers)
                equations.add(seen, dict(setting.layout.views(expert)))
            conditions |= equations.solve()
        return Fitted(weights, setting.heads, {"blocks": len(blocks), **_facts(conditions, len(places))})


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
        conditions = {}
        for name, total in self._totals.items():
            change, conditions[name] = least_squares(total, self._moments[name])
            if not torch.isfinite(change).all():
                raise NumericalError(f"the equations of {name!r} have no finite solution; lower 'alpha'")
            self._average[name].add_(change.T.float().cpu())
        return conditions


def _facts(conditions: Mapping[str, float], tensors: int) -> dict[str, object]:
    """How many tensors were solved for, and how well conditioned their equations are."""
    finite = [number for number in conditions.values() if number != float("inf")]
    facts: dict[str, object] = {
        "layers": len(conditions),
        "averaged": tensors - len(conditions),
        "singular": len(conditions) - len(finite),
    }
    return facts | {"condition": median(finite), "worst": max(finite)} if finite else facts


def _block(name: str) -> str:
    """The path of the block that a weight lies in."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ".".join(parts[:-1])
