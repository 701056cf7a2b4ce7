"""The loop of all fitted methods: per step one forward pass for all tasks, one backward pass, one step of the gates.

Each task contributes `batch` inputs to a step; which ones depends on the seed and the step alone, so that a resumed run
continues as if it had not stopped. Every `look` steps the loss on held-out inputs is computed; the result is the last
state or, with `best`, the one with the least held-out loss among those that were trained. How it compares with the
start is for the caller to judge, who may have better heads for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from orthomerge.core.adam import rate_share
from orthomerge.core.checks import at_least_one, positive
from orthomerge.core.device import enough_memory
from orthomerge.core.errors import NumericalError, RecipeError
from orthomerge.fitting.inputs import Order, encoded, features_of

if TYPE_CHECKING:
    from orthomerge.fitting.gates import Gates
    from orthomerge.fitting.inputs import Inputs, Targets
    from orthomerge.fitting.objective import Objective
    from orthomerge.fitting.setting import Setting


_STATE = {"step", "gates", "parameters", "optimiser", "course"}


@dataclass
class Course:
    """How a fit went. `rows`: one per look; `kept`: gates and parameters of the least held-out loss."""

    rows: list[dict[str, float]] = field(default_factory=list)
    kept: tuple[torch.Tensor, list[torch.Tensor]] | None = None
    least: float = math.inf
    best_step: int = 0
    waited: int = 0  # looks since then


@dataclass(frozen=True)
class Loop:
    """See the module. `cosine`: rates fall to zero along one. `warmup`: share of the steps in which they rise.

    `patience`: looks without a better held-out loss after which it ends; 0 for never. `checkpointing`: activations are
    computed again in the backward pass instead of kept.
    """

    steps: int
    batch: int
    cosine: bool = True
    warmup: float = 0.0
    look: int = 50
    best: bool = False
    patience: int = 0
    checkpointing: bool = False

    def run(self, setting: Setting, gates: Gates, objective: Objective, inputs: Inputs, held: Inputs | None) -> Course:
        """Train gates and objective on some inputs; the encoder is left with the weights that were chosen."""
        return _Run(self, setting, gates, objective, inputs, held).finish()

    def share(self, step: int) -> float:
        """Of the full rate, at a step counted from 0."""
        return rate_share(step, self.steps, warmup=self.warmup) if self.cosine else 1.0


@dataclass
class _Run:
    """One run of a loop, and everything that changes on the way."""

    loop: Loop
    setting: Setting
    gates: Gates
    objective: Objective
    inputs: Inputs
    held: Inputs | None

    def __post_init__(self) -> None:
        self._order = Order(self.inputs, self.loop.batch, self.setting.seed)
        parameters = self.objective.parameters
        self._optimiser = torch.optim.Adam(parameters, lr=self.objective.lr) if parameters else None
        self._course, self._losses = Course(), list[torch.Tensor]()
        self._started = self._saved = time.monotonic()

    def finish(self) -> Course:
        """Carry out all steps that are left."""
        loop, gates, weights = self.loop, self.gates, self.setting.encoder.weights
        gates.write(weights)
        first = self._resume()
        if not first:
            self._look(0)
        work = f"batches of {loop.batch} per task"
        advice = "lower 'batch', or set 'checkpointing: true'"
        with enough_memory(work, advice), _checkpointed(self.setting) if loop.checkpointing else nullcontext():
            for step in range(first, loop.steps):
                self._step(step)
                if (step + 1) % loop.look == 0 or step + 1 == loop.steps:
                    self._look(step + 1)
                    if loop.patience and self._course.waited >= loop.patience:
                        break
                    self._save(step + 1)
        if loop.best and self._course.kept is not None:
            self._restore(*self._course.kept)
        gates.write(weights)
        return self._course

    def _step(self, step: int) -> None:
        encoder, share = self.setting.encoder, self.loop.share(step)
        targets = {task: self.inputs.targets[task].at(places) for task, places in self._order.at(step).items()}
        self._losses.append(backward(self.setting, self.objective, self.inputs, targets))
        self.gates.step(encoder.gradient, encoder.weights, share)
        if self._optimiser is not None:
            self._optimiser.param_groups[0]["lr"] = self.objective.lr * share
            self._optimiser.step()

    def _look(self, step: int) -> None:
        """Measure where the run stands, and keep it if it is the best."""
        loop, course, seconds = self.loop, self._course, time.monotonic() - self._started
        row: dict[str, float] = {"step": step, "seconds": round(seconds, 2)}
        if self._losses:
            row["loss"] = float(torch.stack(self._losses).mean())
            self._losses.clear()
            if not math.isfinite(row["loss"]):
                raise NumericalError(f"the loss is {row['loss']} at step {step} of {loop.steps}; lower 'lr'")
        if self.held is not None:
            row["held_out"] = held_out_loss(self.setting, self.objective, self.held)
            if step and row["held_out"] < course.least:
                course.least, course.best_step, course.waited = row["held_out"], step, 0
                if loop.best:
                    course.kept = self.gates.kept(), [each.detach().clone() for each in self.objective.parameters]
            elif step:
                course.waited += 1
        row |= {**self.gates.measures(), **self.objective.measures()}
        course.rows.append(row)
        words = ", ".join(f"{name} {value:.4g}" for name, value in row.items() if name not in ("step", "seconds"))
        left = f", {seconds / step * (loop.steps - step):.0f} s left" if step else ""
        self.setting.say(f"step {step} of {loop.steps}: {words}{left}")

    def _restore(self, gates: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        self.gates.restore(gates)
        with torch.no_grad():
            for parameter, value in zip(self.objective.parameters, parameters, strict=True):
                parameter.copy_(value)

    def _resume(self) -> int:
        """Continue where a killed run stood; the first step that is left."""
        state = None if self.setting.state is None else self.setting.state.read()
        if state is None or not state.keys() >= _STATE:
            return 0
        self.gates.load(state["gates"])
        self._restore(self.gates.kept(), state["parameters"])
        self.gates.write(self.setting.encoder.weights)
        if self._optimiser is not None:
            self._optimiser.load_state_dict(state["optimiser"])
        self._course = Course(**state["course"])
        self._started -= state["seconds"]
        return int(state["step"])

    def _save(self, step: int) -> None:
        now = time.monotonic()
        if self.setting.state is None or now - self._saved < self.setting.every:
            return
        self._saved = now
        state = {
            "step": step,
            "gates": self.gates.state(),
            "parameters": [parameter.detach() for parameter in self.objective.parameters],
            "optimiser": None if self._optimiser is None else self._optimiser.state_dict(),
            "course": vars(self._course),
            "seconds": now - self._started,
        }
        self.setting.state.write(state)


def backward(setting: Setting, objective: Objective, inputs: Inputs, targets: dict[str, Targets]) -> torch.Tensor:
    """The loss of some targets of each task, without penalty, in one pass that encodes each input once.

    The gradient of loss and penalty is left in the encoder's and in the objective's parameters.
    """
    encoder = setting.encoder
    rows, back = torch.unique(torch.cat([some.rows for some in targets.values()]), return_inverse=True)
    encoder.gradient.zero_()
    for parameter in objective.parameters:
        parameter.grad = None
    with torch.autocast(encoder.device.type, dtype=torch.bfloat16, enabled=setting.half):
        features = features_of(encoder, inputs.pool, rows)
    parts = torch.split(features.float()[back.to(encoder.device)], [len(some) for some in targets.values()])
    loss = objective.loss(dict(zip(targets, parts, strict=True)), targets)
    penalty = objective.penalty()
    (loss if penalty is None else loss + penalty).backward()  # type: ignore[no-untyped-call]
    return loss.detach()


@torch.no_grad()
def held_out_loss(setting: Setting, objective: Objective, held: Inputs) -> float:
    """The mean over tasks of the weighted mean loss of their held-out inputs, with the weights that the encoder has."""
    losses = []
    for task in setting.tasks:
        if len(held.targets[task]):
            features = encoded(setting.encoder, held, task, half=setting.half)
            losses.append(objective.loss({task: features}, {task: held.targets[task]}))
    return float(torch.stack(losses).mean())


def check_loop(*, steps: int, batch: int, lr: float, hold_out: float) -> None:
    """Refuse options that no loop can run with."""
    at_least_one(steps=steps, batch=batch)
    positive(lr=lr)
    if not 0 <= hold_out <= 0.5:
        raise RecipeError(f"'hold_out' must be from 0 to 0.5, got {hold_out}")


@contextmanager
def _checkpointed(setting: Setting) -> Iterator[None]:
    module: Any = setting.encoder.module
    if not hasattr(module, "gradient_checkpointing_enable"):
        raise RecipeError("this encoder has no gradient checkpointing; set 'checkpointing' to false")
    from transformers.modeling_layers import GradientCheckpointingLayer

    module.gradient_checkpointing_enable({"use_reentrant": False})
    for part in module.modules():
        if isinstance(part, GradientCheckpointingLayer):
            part.training = True  # a condition of checkpointing; what is inside stays in eval mode, without dropout
    try:
        yield
    finally:
        module.gradient_checkpointing_disable()
        module.eval()
