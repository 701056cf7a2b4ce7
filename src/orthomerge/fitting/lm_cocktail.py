"""LM-Cocktail: average models with weights by their loss on a few inputs.

Xiao et al., "LM-Cocktail: Resilient Tuning of Language Models via Model Merging", 2023, arXiv 2311.13534.

    theta = sum_i w_i theta_i,    w = softmax(-loss / temperature),    i over the base and all experts,

where loss_i is the mean over tasks t of E_x KL(p_t(.|x) || p_i(.|x)): p_t is predicted by expert t, p_i by model i
with the head of task t.

Differs from the paper: there, the loss is the cross-entropy on labelled examples of one target task. Here the expert's
predictions replace labels, and all tasks are targets. The temperature is that of the paper's code.
"""

import math
from dataclasses import dataclass

import torch

from orthomerge.core.checks import at_least_one, positive
from orthomerge.core.errors import NumericalError
from orthomerge.fitting.objective import on_device
from orthomerge.fitting.setting import Fitted, Setting, encoded
from orthomerge.models.heads import head_kind

_BASE = "(base)"


@dataclass(frozen=True)
class LmCocktail:
    """`temperature`: high for equal weights. `inputs`: number per task, drawn by the seed. `base`: average it, too."""

    temperature: float = 5.0
    inputs: int = 32
    base: bool = True

    def __post_init__(self) -> None:
        positive(temperature=self.temperature)
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
    inputs = setting.drawn(count)
    heads = {task: on_device(head, setting.device) for task, head in setting.heads.items()}
    losses = {}
    for name in [_BASE, *setting.tasks] if base else setting.tasks:
        setting.say(f"losses: {name}")
        setting.encoder.load(setting.base if name == _BASE else setting.tuned(name))
        terms = []
        for task, head in heads.items():
            targets = inputs.targets[task]
            features = encoded(setting.encoder, inputs, task, half=setting.half)
            student, teacher = head(features).double(), head(targets.features).double()
            terms.append(float((targets.weights * head_kind(head.kind).divergence(student, teacher)).mean()))
            if not math.isfinite(terms[-1]):
                raise NumericalError(f"the loss of {name!r} on task {task!r} is {terms[-1]}; check its weights")
        losses[name] = sum(terms) / len(terms)
    return losses
