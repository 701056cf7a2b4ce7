"""Concrete AdaMerging: a random mask that coefficients do well under, then the coefficients; both by least entropy.

Tang et al., "Concrete Subspace Learning based Interference Elimination for Multi-task Model Fusion", 2023, arXiv
2312.06173.

    theta = theta_b + m' sum_t lambda_t^l tau_t^l

1. The mask, two levels a step: every lambda goes back to `start` and makes one step of Adam at `inner_lr` with the mask
   as it is; then the mask's logits make one of theirs, on other inputs, with lambda as it is. See `concrete` for m'.
2. A last mask stays, and lambda is trained as in `adamerging`, one coefficient a task and tensor.

As in the authors' code: x starts at 0, lambda at 0.3, clamped to [0, 1]; the moments of the inner Adam are kept from
one step to the next, although lambda is not; no gradient goes from the second level through the first.

Differs from the authors' code: the inner gradient is taken at the lambda that it moves, where theirs is still that of
the last step's weights; both levels see one sample, as in FusionBench; inputs come in a new order every epoch, and are
those given, not necessarily the test split's; Adam's epsilon is 1e-15.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from orthomerge.core.errors import RecipeError
from orthomerge.fitting.adamerging import coefficient_table
from orthomerge.fitting.coefficients import Coefficients
from orthomerge.fitting.concrete import ConcreteMask, Final, check_temperature
from orthomerge.fitting.entropy import Entropy
from orthomerge.fitting.kinds import Fitted
from orthomerge.fitting.loop import Loop, check_loop, divided
from orthomerge.fitting.starts import task_vectors

if TYPE_CHECKING:
    from orthomerge.fitting.kinds import Setting


@dataclass(frozen=True)
class ConcreteAm:
    """`steps`, `lr`: of the mask, each step with two passes. `inner_lr`: of the coefficients meanwhile.

    `adapt_steps`, `adapt_lr`: of the coefficients under the mask that stays, which `final` names. `clamp`: keep
    coefficients within 0 and 1, as the authors' code does and FusionBench does not.
    """

    start: float = 0.3
    steps: int = 2000
    batch: int = 16
    lr: float = 1e-3
    inner_lr: float = 1.0
    temperature: float = 0.5
    final: Final = "sample"
    adapt_steps: int = 1000
    adapt_lr: float = 1e-3
    clamp: bool = True
    hold_out: float = 0.1
    look: int = 50
    checkpointing: bool = False

    def __post_init__(self) -> None:
        check_loop(steps=self.steps, batch=self.batch, lr=self.lr, hold_out=self.hold_out)
        check_temperature(self.temperature)
        if min(self.inner_lr, self.adapt_lr) <= 0 or self.adapt_steps < 1:
            raise RecipeError("'inner_lr' and 'adapt_lr' must be positive, and 'adapt_steps' at least 1")

    def fit(self, setting: Setting) -> Fitted:
        base, vectors = setting.base.to(setting.device), task_vectors(setting)
        inputs, held = divided(setting.inputs, self.hold_out, seed=setting.seed)
        objective = Entropy(setting.heads, inputs)
        levels = TwoLevels(
            ConcreteMask(
                base,
                torch.zeros_like(base),
                setting.layout,
                temperature=self.temperature,
                lr=self.lr,
                seed=setting.seed,
            ),
            self._coefficients(setting, torch.zeros_like(base), vectors, self.inner_lr),
        )
        # The state of this part lies inside that of the next, so that whatever removes that one removes it.
        state = None if setting.state is None else replace(setting.state, part="mask")
        first = self._loop(2 * self.steps).run(replace(setting, state=state), levels, objective, held)
        facts: dict[str, Any] = levels.measures()
        gates = self._coefficients(setting, base, vectors.mul_(levels.mask.final(self.final)), self.adapt_lr)
        second = self._loop(self.adapt_steps).run(setting, gates, objective, held)
        facts |= {"trained": levels.size + gates.size, "coefficients": coefficient_table(setting, gates)}
        curve = [{"stage": stage, **row} for stage, course in enumerate((first, second), 1) for row in course.rows]
        return Fitted(setting.encoder.weights.cpu().clone(), setting.heads, facts, tuple(curve))

    def _coefficients(self, setting: Setting, origin: torch.Tensor, vectors: torch.Tensor, lr: float) -> Coefficients:
        bounds = (0.0, 1.0) if self.clamp else None
        return Coefficients(origin, vectors, setting.layout, groups="tensor", start=self.start, lr=lr, bounds=bounds)

    def _loop(self, steps: int) -> Loop:
        return Loop(steps=steps, batch=self.batch, cosine=False, look=self.look, checkpointing=self.checkpointing)


class TwoLevels:
    """Gates that step in turn: first the coefficients, then the mask, after which the coefficients start again.

    The coefficients' weights, from an origin of zero, are the mask's vector: the mask is the same for all tasks.
    """

    def __init__(self, mask: ConcreteMask, coefficients: Coefficients) -> None:
        self.mask, self._coefficients = mask, coefficients
        self._start, self._inner = coefficients.kept(), True
        coefficients.write(mask.vector)

    @property
    def size(self) -> int:
        return self.mask.size

    def write(self, weights: torch.Tensor) -> None:
        self.mask.write(weights)

    def step(self, gradient: torch.Tensor, weights: torch.Tensor, share: float) -> None:
        if self._inner:
            self._coefficients.step(gradient * self.mask.mask, self.mask.vector, share)
        else:
            self.mask.step(gradient, weights, share)
            self._coefficients.restore(self._start)
            self._coefficients.write(self.mask.vector)
        self.mask.write(weights)
        self._inner = not self._inner

    def measures(self) -> dict[str, float]:
        return self.mask.measures()

    def kept(self) -> torch.Tensor:
        return self.mask.kept()

    def restore(self, kept: torch.Tensor) -> None:
        self.mask.restore(kept)

    def state(self) -> dict[str, Any]:
        return {"mask": self.mask.state(), "coefficients": self._coefficients.state(), "inner": self._inner}

    def load(self, state: dict[str, Any]) -> None:
        self.mask.load(state["mask"])
        self._coefficients.load(state["coefficients"])
        self._coefficients.write(self.mask.vector)
        self._inner = state["inner"]
