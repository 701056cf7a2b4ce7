"""Training loop of fitted methods: each step is one forward and backward pass for all tasks, then AdamW.

Which `batch` inputs of each task a step sees depends on the seed and the step alone, so that a resumed run gives the
same result. The result is the last state or, with `best`, the trained one with the least held-out loss.
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from orthomerge.core.adam import Optimiser, rate_share
from orthomerge.core.checks import at_least_one, positive
from orthomerge.core.device import derive, enough_memory
from orthomerge.core.errors import NumericalError, RecipeError
from orthomerge.fitting.gates import Gates
from orthomerge.fitting.objective import Objective
from orthomerge.fitting.setting import Inputs, Setting, Targets, encoded, features_of

_STATE = {"step", "optimiser", "course", "seconds"}


@dataclass
class Course:
    """History of a fit. `rows`: one per look; `kept`: the trained tensors at the least held-out loss."""

    rows: list[dict[str, float]] = field(default_factory=list)
    kept: list[torch.Tensor] | None = None
    least: float = math.inf
    best_step: int = 0
    waited: int = 0  # looks since `best_step`


@dataclass(frozen=True)
class Loop:
    """Options of the loop. `warmup`: share of the steps in which learning rates rise; `cosine`: they then fall to zero.

    `look`: steps between two held-out losses; `patience`: looks without a better one before training ends, 0 for no
    limit. `checkpointing`: recompute activations in the backward pass to save memory.
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
        """Train gates and objective on `inputs`, and leave the encoder with the resulting weights."""
        return _Run(self, setting, gates, objective, inputs, held).finish()

    def share(self, step: int) -> float:
        return rate_share(step, self.steps, warmup=self.warmup) if self.cosine else 1.0


class Order:
    """Places of the `batch` targets per task of each step, shuffled every epoch; the same for equal inputs."""

    def __init__(self, inputs: Inputs, batch: int, seed: int) -> None:
        rows = [targets.rows for targets in inputs.targets.values()]
        same = [next(number for number, other in enumerate(rows) if torch.equal(own, other)) for own in rows]
        self._streams, self._sizes = dict(zip(inputs.targets, same, strict=True)), list(map(len, rows))
        self._batch, self._seed = batch, seed

    def at(self, step: int) -> dict[str, torch.Tensor]:
        return {task: self._places(stream, step) for task, stream in self._streams.items()}

    def _places(self, stream: int, step: int) -> torch.Tensor:
        size, start = self._sizes[stream], step * self._batch
        epochs = range(start // size, (start + self._batch - 1) // size + 1)
        places = torch.cat([_shuffled(size, derive(self._seed, stream, epoch)) for epoch in epochs])
        return places[start % size :][: self._batch]


@lru_cache(maxsize=64)
def _shuffled(size: int, seed: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))


class _Run:
    def __init__(
        self, loop: Loop, setting: Setting, gates: Gates, objective: Objective, inputs: Inputs, held: Inputs | None
    ) -> None:
        self.loop, self.setting, self.gates, self.objective = loop, setting, gates, objective
        self.inputs, self.held = inputs, held
        self._order = Order(inputs, loop.batch, setting.seed)
        self._optimiser = Optimiser(
            [*gates.groups, {"params": objective.parameters, "lr": objective.lr}], setting.device
        )
        self._course, self._losses = Course(), list[torch.Tensor]()
        self._started = self._saved = time.monotonic()

    def finish(self) -> Course:
        loop, weights = self.loop, self.setting.encoder.weights
        step = self._resume()
        self.gates.write(weights, step)
        if not step:
            self._look(0)
        with (
            enough_memory(f"batches of {loop.batch} per task", "lower 'batch', or set 'checkpointing: true'"),
            _checkpointed(self.setting) if loop.checkpointing else nullcontext(),
        ):
            while step < loop.steps:
                self._step(step)
                step += 1
                if step % loop.look == 0 or step == loop.steps:
                    self._look(step)
                    if loop.patience and self._course.waited >= loop.patience:
                        break
                    self._save(step)
        if loop.best and self._course.kept is not None:
            self._optimiser.restore(self._course.kept)
        self.gates.write(weights, step)
        return self._course

    def _step(self, step: int) -> None:
        encoder = self.setting.encoder
        targets = {task: self.inputs.targets[task].at(places) for task, places in self._order.at(step).items()}
        self._losses.append(backward(self.setting, self.objective, self.inputs, targets))
        self.gates.backward(encoder.gradient, step)
        self._optimiser.step(self.loop.share(step))
        self.gates.write(encoder.weights, step + 1)

    def _look(self, step: int) -> None:
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
                    course.kept = [value.detach().clone() for value in self._optimiser.values]
            elif step:
                course.waited += 1
        row |= {**self.gates.measures(), **self.objective.measures()}
        course.rows.append(row)
        figures = ", ".join(f"{name} {value:.4g}" for name, value in row.items() if name not in ("step", "seconds"))
        left = f", {seconds / step * (loop.steps - step):.0f} s left" if step else ""
        self.setting.say(f"step {step} of {loop.steps}: {figures}{left}")

    def _resume(self) -> int:
        state = None if self.setting.state is None else self.setting.state.read()
        if state is None or not state.keys() >= _STATE:
            return 0
        self._optimiser.load(state["optimiser"])
        self._course = Course(**state["course"])
        self._started -= state["seconds"]
        return int(state["step"])

    def _save(self, step: int) -> None:
        now = time.monotonic()
        if self.setting.state is None or now - self._saved < self.setting.every:
            return
        self._saved = now
        self.setting.state.write(
            {
                "step": step,
                "optimiser": self._optimiser.state(),
                "course": vars(self._course),
                "seconds": now - self._started,
            }
        )


def backward(setting: Setting, objective: Objective, inputs: Inputs, targets: Mapping[str, Targets]) -> torch.Tensor:
    """Backpropagate loss plus penalty to the encoder and the objective, and return the loss."""
    encoder = setting.encoder
    rows, back = torch.unique(torch.cat([some.rows for some in targets.values()]), return_inverse=True)
    encoder.gradient.zero_()
    with torch.autocast(encoder.device.type, dtype=torch.bfloat16, enabled=setting.half):
        features = features_of(encoder, inputs.pool, rows)
    parts = torch.split(features.float()[back.to(encoder.device)], [len(some) for some in targets.values()])
    loss = objective.loss(dict(zip(targets, parts, strict=True)), targets)
    penalty = objective.penalty()
    (loss if penalty is None else loss + penalty).backward()  # type: ignore[no-untyped-call]
    return loss.detach()


@torch.no_grad()
def held_out_loss(setting: Setting, objective: Objective, held: Inputs) -> float:
    """Mean over tasks of the weighted mean loss of their held-out inputs, under the encoder's current weights."""
    losses = []
    for task in setting.tasks:
        if len(held.targets[task]):
            features = encoded(setting.encoder, held, task, half=setting.half)
            losses.append(objective.loss({task: features}, {task: held.targets[task]}))
    return float(torch.stack(losses).mean())


def check_loop(*, steps: int, batch: int, lr: float, hold_out: float) -> None:
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
            part.training = True  # a condition of checkpointing; its submodules stay in eval mode, without dropout
    try:
        yield
    finally:
        module.gradient_checkpointing_disable()
        module.eval()
