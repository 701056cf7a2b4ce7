"""Concrete task arithmetic: a random mask, shared by all tasks, that makes predictions on unlabelled inputs sure.

Tang et al., "Concrete Subspace Learning based Interference Elimination for Multi-task Model Fusion", 2023, arXiv
2312.06173.

    theta = theta_b + scale sum_t m' tau_t,    min over x of the entropy of softmax(logits), summed over tasks

m' is a sample of the mask with logits x, divided by its mean in each tensor; see `concrete`. As in the authors' code, x
starts at 0, Adam's rate is 1e-3 throughout, and what is put out is one last sample.

Differs from the authors' code: inputs come in a new order every epoch, where theirs repeat the first; inputs are those
given, not necessarily the test split's; Adam's epsilon is 1e-15. Ours are the two ends without chance: `expected`, the
mask without noise, and `binary`, its positive logits. Facts tell the held-out entropy of all three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from orthomerge.fitting.concrete import FINALS, ConcreteMask, Final, check_temperature
from orthomerge.fitting.entropy import Entropy
from orthomerge.fitting.kinds import Fitted
from orthomerge.fitting.loop import Loop, check_loop, divided, held_out_loss
from orthomerge.fitting.starts import summed_vectors

if TYPE_CHECKING:
    from orthomerge.fitting.inputs import Inputs
    from orthomerge.fitting.kinds import Setting


@dataclass(frozen=True)
class ConcreteTa:
    """`scale`: of the summed task vectors. `final`: the mask that is put out. `hold_out`: share only looked at."""

    scale: float = 0.3
    steps: int = 2000
    batch: int = 16
    lr: float = 1e-3
    temperature: float = 0.5
    final: Final = "sample"
    hold_out: float = 0.1
    look: int = 50
    checkpointing: bool = False

    def __post_init__(self) -> None:
        check_loop(steps=self.steps, batch=self.batch, lr=self.lr, hold_out=self.hold_out)
        check_temperature(self.temperature)

    def fit(self, setting: Setting) -> Fitted:
        base = setting.base.to(setting.device)
        vector = summed_vectors(setting).mul_(self.scale)
        inputs, held = divided(setting.inputs, self.hold_out, seed=setting.seed)
        gates = ConcreteMask(base, vector, setting.layout, temperature=self.temperature, lr=self.lr, seed=setting.seed)
        objective = Entropy(setting.heads, inputs)
        loop = Loop(steps=self.steps, batch=self.batch, cosine=False, look=self.look, checkpointing=self.checkpointing)
        course = loop.run(setting, gates, objective, held)
        facts: dict[str, Any] = {**gates.measures(), "trained": gates.size}
        facts["ends"] = self._ends(setting, gates, objective, held, base)
        weights = torch.addcmul(base, gates.final(self.final), vector)
        setting.encoder.load(weights)
        return Fitted(weights.cpu(), setting.heads, facts, tuple(course.rows))

    @staticmethod
    def _ends(
        setting: Setting, gates: ConcreteMask, objective: Entropy, held: Inputs | None, base: torch.Tensor
    ) -> dict[str, float]:
        """The held-out entropy of every way of ending."""
        found: dict[str, float] = {}
        if held is not None:
            for form in FINALS:
                setting.encoder.load(torch.addcmul(base, gates.final(form), gates.vector))
                found[form] = held_out_loss(setting, objective, held)
        return found
