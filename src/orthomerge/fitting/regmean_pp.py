"""RegMean++: RegMean from the first block to the last, on inputs that the merged blocks below have made.

Nguyen et al., "RegMean++: Enhancing Effectiveness and Generalization of Regression Mean for Model Merging", 2025,
arXiv 2508.03121. Code: nthehai01/RegMean-plusplus.

RegMean's equations, but the inputs x of block b in expert t are those of task t after the *merged* blocks below b,
through expert t's own block b. All that is no linear layer is averaged beforehand, embeddings and norms included.

A block is what lies under the first number in a module's path (`encoder.layer.3`, `layers.3`); a linear layer outside
all of them (a pooler, a projection) is a block by itself. Blocks come in the order in which a forward pass calls them.
Differs from the paper: as RegMean does here; see `regmean`. The paper's code leaves layers outside the blocks averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orthomerge.fitting.drawing import at_least_one, drawn, mean_expert
from orthomerge.fitting.grams import called, grams, linear_layers
from orthomerge.fitting.kinds import Fitted
from orthomerge.fitting.regmean import Equations, conditions
from orthomerge.merging.options import fraction

if TYPE_CHECKING:
    from orthomerge.fitting.kinds import Setting


@dataclass(frozen=True)
class RegMeanPp:
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
        calls = called(setting, few)
        modules = linear_layers(setting.encoder.module)
        weights = mean_expert(setting)
        merged, places = dict(setting.layout.views(weights)), setting.layout.places
        blocks = tuple(dict.fromkeys(map(_block, calls)))
        found: dict[str, float] = {}
        for number, block in enumerate(blocks, 1):
            setting.say(f"block {number} of {len(blocks)}: {block}")
            mine = [name for name in calls if _block(name) == block]
            layers = {name: modules[name] for name in mine}
            inside = [name for name in places if name.startswith(f"{block}.")]
            equations = Equations(merged, self.alpha)
            setting.encoder.load(weights)
            for task in setting.tasks:
                expert = setting.tuned(task)
                for name in inside:
                    setting.encoder.weights[places[name]] = expert[places[name]].to(setting.device)
                seen = grams(setting, few, task, layers=layers, calls=len(mine))
                equations.add(seen, dict(setting.layout.views(expert)))
            found |= equations.solve()
        facts = conditions(found, len(places))
        return Fitted(weights, setting.heads, {"blocks": len(blocks), **facts})


def _block(name: str) -> str:
    """The path of the block that a weight lies in."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ".".join(parts[:-1])
