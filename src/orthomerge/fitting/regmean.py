"""RegMean: the linear layers whose outputs are nearest to every expert's on its own inputs.

Jin et al., "Dataless Knowledge Fusion by Merging Weights of Language Models", 2023, arXiv 2212.09849.

Per linear layer, W minimises sum_t E_x ||W x - W_t x||^2 over the inputs x of that layer in expert t on task t:

    (sum_t G_t) W^T = sum_t G_t W_t^T,    G_t = E x x^T with everything off the diagonal times `alpha`.

RegMean++: the same block by block, on inputs x from the merged blocks below.

Nguyen et al., "RegMean++: Enhancing Effectiveness and Generalization of Regression Mean for Model Merging", 2025,
arXiv 2508.03121. Code: nthehai01/RegMean-plusplus.

A block is the module up to the first number in a path (`encoder.layer.3`), or a linear layer outside of these. Blocks
follow the order of a forward pass. The inputs x of block b in expert t are those of task t after the *merged* blocks
below b, through expert t's own b.

Letters: T experts; W, W_t [m, k]; G_t [k, k]; see `grams` for which weights are linear layers and which rows count.
Everything else is averaged: biases, norms, embeddings, convolutions, and linear layers that are never called.
Differs from the papers: padded positions do not count. Solved in float64 for the difference to the average, which is
kept in directions that no input has. `alpha` is FusionBench's; RegMean's code has 0.1 or 0.9. RegMean++'s code leaves
layers outside the blocks averaged.
"""

from dataclasses import dataclass
from statistics import median
from typing import ClassVar

import torch

from orthomerge.core.checks import at_least_one, fraction
from orthomerge.core.errors import NumericalError
from orthomerge.fitting.grams import Layers, called, grams, least_squares, linear_layers
from orthomerge.fitting.setting import Fitted, Inputs, Setting


@dataclass(frozen=True)
class RegMean:
    """`alpha`: factor of G's off-diagonal elements (0: independent). `inputs`: number per task, drawn by the seed."""

    alpha: float = 0.95
    inputs: int = 256

    blockwise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        fraction(alpha=self.alpha, zero=True)
        at_least_one(inputs=self.inputs)

    def fit(self, setting: Setting) -> Fitted:
        inputs = setting.drawn(self.inputs)
        calls, modules = called(setting, inputs), linear_layers(setting.encoder.module)
        blocks = tuple(dict.fromkeys(map(_block, calls))) if self.blockwise else ("",)
        weights, places = setting.mean_expert(), setting.layout.places
        conditions: dict[str, float] = {}
        for number, block in enumerate(blocks, 1):
            setting.say(f"block {number} of {len(blocks)}: {block}" if block else "inputs of every layer")
            layers = {name: modules[name] for name in calls if _block(name) == block} if block else modules
            own = [place for name, place in places.items() if not block or name.startswith(f"{block}.")]
            conditions |= self._solve(setting, inputs, weights, layers, own)
        finite = [number for number in conditions.values() if number != float("inf")]
        facts: dict[str, object] = {"blocks": len(blocks)} if self.blockwise else {}
        facts |= {
            "layers": len(conditions),
            "averaged": len(places) - len(conditions),
            "singular": len(conditions) - len(finite),
        }
        if finite:
            facts |= {"condition": median(finite), "worst": max(finite)}
        return Fitted(weights, setting.heads, facts)

    def _solve(
        self, setting: Setting, inputs: Inputs, weights: torch.Tensor, layers: Layers, own: list[slice]
    ) -> dict[str, float]:
        """Solve some layers, write them into `weights`, and return their condition numbers by name.

        `own`: places in [P] that have the expert's weights while the inputs of the layers are computed.
        """
        average, encoder = dict(setting.layout.views(weights)), setting.encoder
        totals: dict[str, torch.Tensor] = {}  # sum_t G_t
        moments: dict[str, torch.Tensor] = {}  # sum_t G_t (W_t - mean W)^T
        encoder.load(weights)
        for task in setting.tasks:
            flat = setting.tuned(task)
            for place in own:
                encoder.weights[place] = flat[place].to(setting.device)
            expert = dict(setting.layout.views(flat))
            for name, gram in grams(setting, inputs, task, layers=layers).items():
                G = gram * self.alpha + torch.diag(gram.diagonal() * (1 - self.alpha))
                moment = G @ (expert[name] - average[name]).to(G.device).double().T
                totals[name] = totals[name].add_(G) if name in totals else G
                moments[name] = moments[name].add_(moment) if name in moments else moment
        conditions = {}
        for name, total in totals.items():
            change, conditions[name] = least_squares(total, moments[name])
            if not torch.isfinite(change).all():
                raise NumericalError(f"the normal equations of {name!r} have no finite solution; lower 'alpha'")
            average[name].add_(change.T.float().cpu())
        return conditions


@dataclass(frozen=True)
class RegMeanPp(RegMean):
    """RegMean++, with the options of RegMean."""

    blockwise: ClassVar[bool] = True


def _block(name: str) -> str:
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ".".join(parts[:-1])
