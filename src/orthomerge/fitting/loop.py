"""The loop of all fitted methods: one forward pass for all tasks a step, one backward, one step of the gates.

Every task gives `batch` inputs to a step. Its inputs come in a new order every epoch; which ones a step sees depends on
the seed and the step alone, so that a resumed run goes on as if it had not stopped. Some inputs of every task are held
out (`hold_out`), and the loss on them is looked at every `look` steps; what is kept in the end is what came out, or
what they liked best of all that was trained (`best`). How it compares with the start is for the caller to judge, who
may have better heads for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from orthomerge.core.errors import NumericalError, OrthomergeError, RecipeError
from orthomerge.fitting.inputs import encoded
from orthomerge.fitting.passes import backward
from orthomerge.tuning.settings import derive

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orthomerge.fitting.gates import Gates
    from orthomerge.fitting.inputs import Inputs
    from orthomerge.fitting.kinds import Setting
    from orthomerge.fitting.objective import Objective


_FEWEST = 10  # inputs of a task from which some are held out
_MOST_HELD = 500
_STATE = {"step", "gates", "parameters", "optimiser", "course"}
_BETWEEN = 60.0  # seconds between two states on disk, if the setting does not say


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

    def run(self, setting: Setting, gates: Gates, objective: Objective, held: Inputs | None) -> Course:
        """Train `gates` and the objective's parameters on the objective's inputs; the encoder is left with the weights
        that were chosen.
        """
        course, inputs = Course(), objective.inputs
        rows = [inputs.targets[task].rows for task in setting.tasks]
        starts = [inputs.starts[task] for task in setting.tasks]
        order = _Order([len(own) for own in rows], self.batch, setting.seed, _streams(rows))
        optimiser = torch.optim.Adam(objective.parameters, lr=objective.lr) if objective.parameters else None
        encoder = setting.encoder
        gates.write(encoder.weights)
        first = self._resumed(setting, gates, objective, optimiser, course)
        if not first:
            self._look(0, None, setting, gates, objective, held, course)
        with _memory(self.batch), self._checkpointed(setting):
            for step in range(first, self.steps):
                share = self._share(step)
                numbers = torch.stack([start + places for start, places in zip(starts, order.at(step), strict=True)])
                loss = backward(setting, objective, numbers)
                with torch.no_grad():
                    gates.step(encoder.gradient, encoder.weights, share)
                if optimiser is not None:
                    optimiser.param_groups[0]["lr"] = objective.lr * share
                    optimiser.step()
                course.losses.append(loss)
                done = step + 1
                if done % self.look == 0 or done == self.steps:
                    self._look(done, course.mean_loss(), setting, gates, objective, held, course)
                    if self.patience and course.waited >= self.patience:
                        break
                    self._save(setting, gates, objective, optimiser, course, done)
        if self.best and course.kept is not None:
            gates.restore(course.kept[0])
            with torch.no_grad():
                for parameter, value in zip(objective.parameters, course.kept[1], strict=True):
                    parameter.copy_(value)
        gates.write(encoder.weights)
        return course

    def _look(
        self,
        step: int,
        loss: float | None,
        setting: Setting,
        gates: Gates,
        objective: Objective,
        held: Inputs | None,
        course: Course,
    ) -> None:
        found: dict[str, float] = {"step": step, "seconds": round(course.seconds(), 2)}
        if loss is not None:
            if not math.isfinite(loss):
                raise NumericalError(f"the loss is {loss} at step {step} of {self.steps}; lower 'lr'")
            found["loss"] = loss
        if held is not None:
            found["held_out"] = held_out_loss(setting, objective, held)
            if step:
                course.judge(found["held_out"], step, gates, objective, keep=self.best)
        found |= {**gates.measures(), **objective.measures()}
        course.rows.append(found)
        left = course.seconds() / step * (self.steps - step) if step else None
        words = ", ".join(f"{name} {value:.4g}" for name, value in found.items() if name not in ("step", "seconds"))
        setting.say(f"step {step} of {self.steps}: {words}" + ("" if left is None else f", {left:.0f} s left"))

    def _share(self, step: int) -> float:
        """Of the full rate, at a step counted from 0."""
        rising = math.ceil(self.warmup * self.steps)
        if step < rising:
            return (step + 1) / rising
        if not self.cosine:
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(self.steps - rising, 1)))

    def _resumed(
        self, setting: Setting, gates: Gates, objective: Objective, optimiser: torch.optim.Adam | None, course: Course
    ) -> int:
        """Where a killed run stood: the first step to do."""
        state = None if setting.state is None else setting.state.read()
        if state is None or not state.keys() >= _STATE:
            return 0
        gates.load(state["gates"])
        gates.write(setting.encoder.weights)
        with torch.no_grad():
            for parameter, value in zip(objective.parameters, state["parameters"], strict=True):
                parameter.copy_(value)
        if optimiser is not None:
            optimiser.load_state_dict(state["optimiser"])
        course.load(state["course"], setting.device)
        return int(state["step"])

    def _save(
        self,
        setting: Setting,
        gates: Gates,
        objective: Objective,
        optimiser: torch.optim.Adam | None,
        course: Course,
        step: int,
    ) -> None:
        if setting.state is None or not course.due(_BETWEEN if setting.every is None else setting.every):
            return
        setting.state.write(
            {
                "step": step,
                "gates": gates.state(),
                "parameters": [parameter.detach() for parameter in objective.parameters],
                "optimiser": None if optimiser is None else optimiser.state_dict(),
                "course": course.state(),
            }
        )

    @contextmanager
    def _checkpointed(self, setting: Setting) -> Iterator[None]:
        module: Any = setting.encoder.module
        if not self.checkpointing:
            yield
            return
        if not hasattr(module, "gradient_checkpointing_enable"):
            raise RecipeError("this encoder has no gradient checkpointing; set 'checkpointing' to false")
        from transformers.modeling_layers import GradientCheckpointingLayer

        module.gradient_checkpointing_enable({"use_reentrant": False})
        for part in module.modules():
            if isinstance(part, GradientCheckpointingLayer):
                part.training = True  # which it asks for; what is inside it stays in eval mode, without dropout
        try:
            yield
        finally:
            module.gradient_checkpointing_disable()
            module.eval()


@dataclass
class Course:
    """How a fit went. `rows`: one a look; `kept`: gates and parameters of the best held-out loss."""

    rows: list[dict[str, float]] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    kept: tuple[torch.Tensor, list[torch.Tensor]] | None = None
    least: float = math.inf
    best_step: int = 0
    waited: int = 0
    _started: float = field(default_factory=time.monotonic)
    _saved: float = field(default_factory=time.monotonic)

    def mean_loss(self) -> float:
        """Since the last look."""
        found = float(torch.stack(self.losses).mean())
        self.losses.clear()
        return found

    def judge(self, loss: float, step: int, gates: Gates, objective: Objective, *, keep: bool) -> None:
        if loss < self.least:
            self.least, self.best_step, self.waited = loss, step, 0
            if keep:
                self.kept = gates.kept(), [parameter.detach().clone() for parameter in objective.parameters]
        else:
            self.waited += 1

    def seconds(self) -> float:
        return time.monotonic() - self._started

    def due(self, seconds: float) -> bool:
        """Whether so much time has passed since it was due last."""
        now = time.monotonic()
        if now - self._saved < seconds:
            return False
        self._saved = now
        return True

    def state(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "kept": self.kept,
            "least": self.least,
            "best_step": self.best_step,
            "waited": self.waited,
            "seconds": self.seconds(),
        }

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        self.rows = list(state["rows"])
        if state["kept"] is not None:
            gates, parameters = state["kept"]
            self.kept = gates.to(device), [parameter.to(device) for parameter in parameters]
        self.least, self.best_step, self.waited = state["least"], state["best_step"], state["waited"]
        self._started = time.monotonic() - state["seconds"]


@torch.no_grad()
def held_out_loss(setting: Setting, objective: Objective, held: Inputs) -> float:
    """The mean over tasks of the weighted mean loss of their held-out inputs, with the weights that the encoder has."""
    means = []
    for task in setting.tasks:
        targets = held.targets[task]
        if not len(targets):
            continue
        features = encoded(setting.encoder, held, task, half=setting.half)
        means.append((targets.weights * objective.judge(features, targets, task)).mean())
    return float(torch.stack(means).mean())


def divided(inputs: Inputs, share: float, *, seed: int, fewest: int = _FEWEST) -> tuple[Inputs, Inputs | None]:
    """Inputs to fit on, and some to hold out of every task that has enough; None if none has.

    An input of several tasks is held out of all of them or of none: the first of them decides.
    """
    if not share or max(map(len, inputs.targets.values())) < fewest:
        return inputs, None
    generator = torch.Generator().manual_seed(seed)
    fitted, held = {}, {}
    decided = torch.zeros(inputs.size, dtype=torch.int8)  # 1: held out, -1: fitted on
    for task, targets in inputs.targets.items():
        count = min(max(round(share * len(targets)), 2), _MOST_HELD) if len(targets) >= fewest else 0
        mixed = torch.randperm(len(targets), generator=generator)
        before = decided[targets.rows[mixed]]
        more = max(count - int((before > 0).sum()), 0)
        apart = torch.cat([mixed[before > 0], mixed[before == 0][:more]])
        rest = torch.cat([mixed[before < 0], mixed[before == 0][more:]])
        decided[targets.rows[apart]], decided[targets.rows[rest]] = 1, -1
        held[task], fitted[task] = apart.sort().values, rest.sort().values
    return inputs.at(fitted), inputs.at(held)


def check_loop(*, steps: int, batch: int, lr: float, hold_out: float) -> None:
    """Refuse options that no loop can run with."""
    for name, count in (("steps", steps), ("batch", batch)):
        if count < 1:
            raise RecipeError(f"{name!r} must be at least 1, got {count}")
    if not 0 < lr < math.inf:
        raise RecipeError(f"'lr' must be positive, got {lr}")
    if not 0 <= hold_out <= 0.5:
        raise RecipeError(f"'hold_out' must be from 0 to 0.5, got {hold_out}")


class _Order:
    """Which inputs of each task a step sees: places among its own, [B] each. `streams`: whose order each follows."""

    def __init__(self, sizes: list[int], batch: int, seed: int, streams: list[int]) -> None:
        self._sizes, self._batch, self._seed, self._streams = sizes, batch, seed, streams
        self._known: dict[tuple[int, int], torch.Tensor] = {}

    def at(self, step: int) -> list[torch.Tensor]:
        return [self._of(number, step) for number in self._streams]

    def _of(self, number: int, step: int) -> torch.Tensor:
        size, at, left = self._sizes[number], step * self._batch, self._batch
        parts = []
        while left:
            epoch, place = divmod(at, size)
            count = min(left, size - place)
            parts.append(self._epoch(number, epoch)[place : place + count])
            at, left = at + count, left - count
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _epoch(self, number: int, epoch: int) -> torch.Tensor:
        key = (number, epoch)
        if key not in self._known:
            for old in [known for known in self._known if known[0] == number and known[1] < epoch - 1]:
                del self._known[old]
            generator = torch.Generator().manual_seed(derive(self._seed, number, epoch))
            self._known[key] = torch.randperm(self._sizes[number], generator=generator)
        return self._known[key]


def _streams(rows: list[torch.Tensor]) -> list[int]:
    """For each task the first one with the same inputs, so that each of these is encoded once for all of them."""
    return [next(number for number, other in enumerate(rows) if torch.equal(own, other)) for own in rows]


@contextmanager
def _memory(batch: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OrthomergeError(
            f"the device ran out of memory with batches of {batch} a task; lower 'batch', or set 'checkpointing: true'"
        ) from error
