"""Concrete merging: a random mask, shared by all tasks, fitted for confident predictions on unlabelled inputs.

Tang et al., "Concrete Subspace Learning based Interference Elimination for Multi-task Model Fusion", 2023, arXiv
2312.06173.

    concrete_ta:    theta = theta_b + scale sum_t m' tau_t,               min over x of the entropy, summed over tasks
    concrete_am:    theta = theta_b + m' sum_t lambda_t^l tau_t^l,        the same over x, then over lambda

m' = m / mean(m), tensor by tensor, where m = sigma((x + logit(u)) / temperature) is a relaxed Bernoulli sample with
logits x, drawn anew every step. As in the authors' code, x starts at 0, Adam's rate is 1e-3 throughout, and the result
is the last sample (`final`; ours are `expected`, without noise, and `binary`, x >= 0).

Differs from the authors' code: inputs come in a new order every epoch and are the caller's; Adam's epsilon is 1e-15.

Letters: x, m, m', u, V, theta [P].
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from orthomerge.core.checks import at_least_one, positive
from orthomerge.core.device import derive
from orthomerge.fitting.adamerging import coefficient_table
from orthomerge.fitting.gates import Coefficients, Gates, masked_share
from orthomerge.fitting.layout import Layout
from orthomerge.fitting.loop import Loop, check_loop, held_out_loss
from orthomerge.fitting.objective import Entropy
from orthomerge.fitting.setting import Fitted, Setting

Final = Literal["sample", "expected", "binary"]

_LEAST = 1e-7  # of u, and of a mean


class ConcreteMask(Gates):
    """theta = theta_b + m' V. `vector`: V, which may change between steps; `mask`: m' of the last step.

    The gradient of x (`values`) is (dtheta V - mean(dtheta V m')) m' (1 - m) / temperature, the mean over the tensor.
    """

    def __init__(
        self,
        base: torch.Tensor,
        vector: torch.Tensor,
        layout: Layout,
        *,
        temperature: float = 0.5,
        lr: float = 1e-3,
        seed: int = 0,
    ) -> None:
        super().__init__(torch.zeros_like(base), lr=lr)
        self.vector, self.mask = vector, torch.ones_like(base)
        self._base, self._places = base, list(layout.places.values())
        self._temperature, self._seed = temperature, seed
        self._means = [torch.ones(()) for _ in self._places]  # mean(m), one per tensor

    def write(self, weights: torch.Tensor, step: int = 0) -> None:
        generator = torch.Generator(self.mask.device).manual_seed(derive(self._seed, "concrete", step))
        for number, place in enumerate(self._places):
            logits = self.values[place]
            noise = torch.rand(logits.shape, generator=generator, device=logits.device).logit_(_LEAST)
            m = noise.add_(logits).div_(self._temperature).sigmoid_()
            self._means[number] = m.mean().clamp_min(_LEAST)
            self.mask[place] = m.div_(self._means[number])
        torch.addcmul(self._base, self.mask, self.vector, out=weights)

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        own = gradient * self.vector
        for place, mean in zip(self._places, self._means, strict=True):
            part, scaled = own[place], self.mask[place]
            part -= (part * scaled).mean()
            part.mul_(scaled).mul_(1 - scaled * mean).div_(self._temperature)
        return own

    def final(self, form: Final) -> torch.Tensor:
        """Final m' [P]: the last sample, or m = sigma(x / temperature), or m = 1 where x >= 0."""
        if form == "sample":
            return self.mask
        mask = torch.ones_like(self.mask)
        for place in self._places:
            logits = self.values[place]
            m = (logits >= 0).float() if form == "binary" else torch.sigmoid(logits / self._temperature)
            mask[place] = m / m.mean().clamp_min(_LEAST)
        return mask

    def write_final(self, weights: torch.Tensor, form: Final) -> None:
        torch.addcmul(self._base, self.final(form), self.vector, out=weights)

    def measures(self) -> dict[str, float]:
        return {"masked": masked_share(self.values, self.vector)}


class TwoLevels(Gates):
    """Alternate steps of coefficients, which are reset before each of theirs and make the mask's V, and of the mask."""

    def __init__(self, mask: ConcreteMask, coefficients: Coefficients) -> None:
        self.mask, self.values, self._coefficients = mask, mask.values, coefficients
        self._start, self.groups = coefficients.values.clone(), mask.groups + coefficients.groups

    def write(self, weights: torch.Tensor, step: int = 0) -> None:
        if step % 2 == 0:
            self._coefficients.values.copy_(self._start)
        self._coefficients.write(self.mask.vector)
        self.mask.write(weights, step // 2)

    def backward(self, gradient: torch.Tensor, step: int) -> None:
        if step % 2 == 0:
            self._coefficients.backward(gradient * self.mask.mask, step)
        else:
            self.mask.backward(gradient, step)

    def measures(self) -> dict[str, float]:
        return self.mask.measures()


@dataclass(frozen=True)
class _Concrete:
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
        positive(temperature=self.temperature)

    def _mask(self, setting: Setting, vector: torch.Tensor) -> ConcreteMask:
        base = setting.base.to(setting.device)
        return ConcreteMask(base, vector, setting.layout, temperature=self.temperature, lr=self.lr, seed=setting.seed)

    def _loop(self, steps: int) -> Loop:
        return Loop(steps=steps, batch=self.batch, cosine=False, look=self.look, checkpointing=self.checkpointing)


@dataclass(frozen=True)
class ConcreteTa(_Concrete):
    """`scale`: of the summed task vectors. Facts give the held-out entropy of all three final masks."""

    scale: float = 0.3

    def fit(self, setting: Setting) -> Fitted:
        vector = torch.zeros(setting.layout.size)
        for task in setting.tasks:
            vector += setting.task_vector(task)
        gates = self._mask(setting, vector.to(setting.device).mul_(self.scale))
        inputs, held = setting.inputs.divided(self.hold_out, seed=setting.seed)
        objective = Entropy(setting.heads, setting.device)
        course = self._loop(self.steps).run(setting, gates, objective, inputs, held)
        weights = setting.encoder.weights
        ends: dict[str, float] = {}
        if held is not None:
            for form in get_args(Final):
                gates.write_final(weights, form)
                ends[form] = held_out_loss(setting, objective, held)
        gates.write_final(weights, self.final)
        facts = {**gates.measures(), "trained": gates.size, "ends": ends}
        return Fitted(weights.cpu().clone(), setting.heads, facts, tuple(course.rows))


@dataclass(frozen=True)
class ConcreteAm(_Concrete):
    """Concrete AdaMerging: train a mask, then coefficients under it; both by least entropy.

    1. Every step on the mask is two: lambda is reset to `start` and takes one step of Adam at `inner_lr`; then the
       mask's logits take a step with this lambda, on other inputs. No gradient goes through the first step.
    2. The mask of `final` is fixed, and lambda is trained as in `adamerging`, one coefficient per task and tensor.

    As in the authors' code, lambda is clamped to [0, 1] (`clamp`; FusionBench does not), and the inner Adam keeps its
    moments although lambda is reset. Differs from it: the inner gradient is taken at the current lambda, theirs at the
    last step's weights; both levels use one sample, as in FusionBench.

    `steps`, `lr`: of the mask, each step with two passes. `adapt_steps`, `adapt_lr`: of the coefficients in part 2.
    """

    start: float = 0.3
    inner_lr: float = 1.0
    adapt_steps: int = 1000
    adapt_lr: float = 1e-3
    clamp: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(inner_lr=self.inner_lr, adapt_lr=self.adapt_lr)
        at_least_one(adapt_steps=self.adapt_steps)

    def fit(self, setting: Setting) -> Fitted:
        base, vectors = setting.base.to(setting.device), setting.task_vectors()
        inputs, held = setting.inputs.divided(self.hold_out, seed=setting.seed)
        objective, zero = Entropy(setting.heads, setting.device), torch.zeros_like(base)
        mask = self._mask(setting, zero.clone())
        levels = TwoLevels(mask, self._coefficients(setting, zero, vectors, self.inner_lr))
        # The state of this part is inside that of the next, so that both are removed together.
        state = None if setting.state is None else replace(setting.state, part="mask")
        first = self._loop(2 * self.steps).run(replace(setting, state=state), levels, objective, inputs, held)
        gates = self._coefficients(setting, base, vectors.mul_(mask.final(self.final)), self.adapt_lr)
        second = self._loop(self.adapt_steps).run(setting, gates, objective, inputs, held)
        facts = {
            **levels.measures(),
            "trained": levels.size + gates.size,
            "coefficients": coefficient_table(setting, gates),
        }
        curve = [{"stage": stage, **row} for stage, course in enumerate((first, second), 1) for row in course.rows]
        return Fitted(setting.encoder.weights.cpu().clone(), setting.heads, facts, tuple(curve))

    def _coefficients(self, setting: Setting, origin: torch.Tensor, vectors: torch.Tensor, lr: float) -> Coefficients:
        return Coefficients(origin, vectors, setting.layout, by_tensor=True, start=self.start, lr=lr, clamp=self.clamp)
