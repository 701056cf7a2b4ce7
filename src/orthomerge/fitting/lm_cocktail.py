"""LM-Cocktail: a weighted average in which models count by how little they lose on a few examples.

Xiao et al., "LM-Cocktail: Resilient Tuning of Language Models via Model Merging", 2023, arXiv 2311.13534.

    theta = sum_i w_i theta_i,    w = softmax(-loss / temperature),    i over the base and all experts,

where loss_i is the mean over tasks t of the divergence of model i, read through the head of task t, from what expert t
itself predicts: E_x KL(p_t(.|x) || p_i(.|x)).

Differs from the paper: there, the loss is the cross-entropy on labelled examples of one target task. Here there are no
labels, and all tasks are targets; the expert's soft predictions stand in. Their entropy, by which cross-entropy and
divergence differ, is the same for every model and cancels in w. The temperature is that of the paper's code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from orthomerge.core.checks import at_least_one
from orthomerge.core.errors import NumericalError, RecipeError
from orthomerge.fitting.inputs import encoded
from orthomerge.fitting.setting import Fitted
from orthomerge.merging.options import finite
from orthomerge.models.heads import head_kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orthomerge.fitting.setting import Setting


_BASE = "(base)"


@dataclass(frozen=True)
class LmCocktail:
    """`temperature`: high values give equal weights. `inputs`: how many of each task are looked at, by the seed.

    `base`: whether the base takes part.
    """

    temperature: float = 5.0
    inputs: int = 32
    base: bool = True

    def __post_init__(self) -> None:
        finite("temperature", self.temperature)
        if self.temperature <= 0:
            raise RecipeError(f"'temperature' must be positive, got {self.temperature}")
        at_least_one(inputs=self.inputs)

    def fit(self, setting: Setting) -> Fitted:
        losses = _losses(setting, self.inputs, base=self.base)
        shares = torch.softmax(-torch.tensor(list(losses.values()), dtype=torch.float64) / self.temperature, 0)
        by_name = dict(zip(losses, shares.tolist(), strict=True))
        weights = setting.base.clone()
        for task in setting.tasks:
            weights.add_(setting.task_vector(task), alpha=by_name[task])
        facts: dict[str, object] = {}
        if self.base:
            facts = {"base": by_name.pop(_BASE), "base_loss": losses.pop(_BASE)}
        return Fitted(weights, setting.heads, {"weights": by_name, "losses": losses, **facts})


@torch.no_grad()
def _losses(setting: Setting, count: int, *, base: bool) -> dict[str, float]:
    """The loss of every model that takes part, by name."""
    few, heads = setting.drawn(count), setting.heads_on_device()
    losses = {}
    for name, weights in _models(setting, base=base):
        setting.say(f"losses: {name}")
        setting.encoder.load(weights)
        terms = []
        for task, head in heads.items():
            targets = few.targets[task]
            features = encoded(setting.encoder, few, task, half=setting.half)
            student, teacher = head(features).double(), head(targets.features).double()
            terms.append(float((targets.weights * head_kind(head.kind).divergence(student, teacher)).mean()))
            if not math.isfinite(terms[-1]):
                raise NumericalError(f"the loss of {name!r} on task {task!r} is {terms[-1]}; look at its weights")
        losses[name] = sum(terms) / len(terms)
    return losses


def _models(setting: Setting, *, base: bool) -> Iterator[tuple[str, torch.Tensor]]:
    if base:
        yield _BASE, setting.base
    for task in setting.tasks:
        yield task, setting.tuned(task)
