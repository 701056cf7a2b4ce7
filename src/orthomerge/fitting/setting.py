"""What a fitted method gets and returns: an encoder and unlabelled inputs; weights and heads.

A fitted method is a frozen dataclass whose fields are its options, with `fit(setting) -> Fitted`. Weights are flat
float32 tensors [P]; see `layout`. Each task has targets: its expert's features of some inputs of a common pool.

Letters: T tasks; n targets of one task; d features; P elements of the encoder; a *row* is the number of an input in the
pool, a *place* one of 0 to n - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from orthomerge.core.device import free_memory
from orthomerge.core.errors import NumericalError, RecipeError
from orthomerge.data.task import Examples
from orthomerge.files.run_state import RunState
from orthomerge.fitting.layout import FlatEncoder, Layout
from orthomerge.models.heads import Classifier, Head
from orthomerge.models.prepared import Batch, Part, Pool
from orthomerge.models.processing import Processor

_SHARE = 3  # processed inputs may take one third of the free memory
_FEWEST = 10  # inputs of a task from which some are held out
_MOST_HELD = 500  # held-out inputs per task


@dataclass(frozen=True)
class Targets:
    """An expert's features of some inputs, and the weight of each target's loss; means are over the number of targets.

    `rows` [n]: distinct inputs of the pool, on the CPU. `features` [n, d] and `weights` [n]: float32, on the device.
    """

    rows: torch.Tensor
    features: torch.Tensor
    weights: torch.Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, places: torch.Tensor | slice) -> Targets:
        index = places if isinstance(places, slice) else places.to(self.features.device, non_blocking=True)
        return Targets(self.rows[places], self.features[index], self.weights[index])

    def followed_by(self, other: Targets) -> Targets:
        pairs = ((self.rows, other.rows), (self.features, other.features), (self.weights, other.weights))
        return Targets(*(torch.cat(pair) for pair in pairs))


@dataclass(frozen=True)
class Inputs:
    """A pool, and targets by task in the order of the tasks. `processors`: by task, for further inputs."""

    targets: Mapping[str, Targets]
    pool: Pool
    processors: Mapping[str, Processor]

    def batches(self, task: str, size: int) -> Iterator[tuple[Targets, Batch]]:
        targets = self.targets[task]
        for start in range(0, len(targets), size):
            some = targets.at(slice(start, start + size))
            yield some, self.pool.batch(some.rows)

    def with_targets(self, targets: Mapping[str, Targets]) -> Inputs:
        return replace(self, targets=dict(targets))

    def at(self, places: Mapping[str, torch.Tensor | slice]) -> Inputs:
        return self.with_targets({task: self.targets[task].at(some) for task, some in places.items()})

    def extended(self, parts: Sequence[Part]) -> Inputs:
        device = self.pool.device
        return replace(self, pool=Pool.of((*self.pool.parts, *parts), device, room=_room(device)))

    def raw(self, task: str) -> list[Any]:
        """Unprocessed inputs of a task: texts, or images as arrays."""
        return self.pool.raw(self.targets[task].rows.tolist())

    def divided(self, share: float, *, seed: int, fewest: int = _FEWEST) -> tuple[Inputs, Inputs | None]:
        """Split off a share of every task with at least `fewest` inputs, to hold out; None if there is no such task.

        An input of several tasks is held out of all of them or of none.
        """
        if not share or max(map(len, self.targets.values())) < fewest:
            return self, None
        generator = torch.Generator().manual_seed(seed)
        fitted, held = {}, {}
        decided = torch.zeros(len(self.pool), dtype=torch.int8)  # 1: held out, -1: fitted on
        for task, targets in self.targets.items():
            count = min(max(round(share * len(targets)), 2), _MOST_HELD) if len(targets) >= fewest else 0
            mixed = torch.randperm(len(targets), generator=generator)
            before = decided[targets.rows[mixed]]
            more = max(count - int((before > 0).sum()), 0)
            apart = torch.cat([mixed[before > 0], mixed[before == 0][:more]])
            rest = torch.cat([mixed[before < 0], mixed[before == 0][more:]])
            decided[targets.rows[apart]], decided[targets.rows[rest]] = 1, -1
            held[task], fitted[task] = apart.sort().values, rest.sort().values
        return self.at(fitted), self.at(held)


def prepare(
    examples: Mapping[str, Examples],
    processors: Mapping[str, Processor],
    teacher: Mapping[str, torch.Tensor],
    *,
    device: torch.device,
) -> Inputs:
    """Make inputs that belong to one task each. `teacher`: features [n, d] of the task's expert."""
    targets, start = {}, 0
    for task, some in examples.items():
        rows = torch.arange(start, start + len(some))
        start += len(some)
        targets[task] = Targets(rows, teacher[task].float().to(device), torch.ones(len(some), device=device))
    parts = [Part(some, processors[task]) for task, some in examples.items()]
    return Inputs(targets, Pool.of(parts, device, room=_room(device)), dict(processors))


def features_of(encoder: FlatEncoder, pool: Pool, rows: torch.Tensor) -> torch.Tensor:
    """Features [B, d] of some rows under autograd, computed in groups of similar length (`Pool.groups`)."""
    groups = pool.groups(rows)
    features = torch.cat([encoder.features(pool.batch(rows[places])) for places in groups])
    return features[torch.cat(groups).argsort().to(encoder.device)]


@torch.no_grad()
def encoded_rows(
    encoder: FlatEncoder, pool: Pool, rows: torch.Tensor, *, size: int = 256, half: bool = False
) -> torch.Tensor:
    """Features [n, d] of some rows under the encoder's current weights, in float32 on the device."""
    order = pool.by_length(rows)
    with torch.autocast(encoder.device.type, dtype=torch.bfloat16, enabled=half):
        parts = [encoder.features(pool.batch(some)).float() for some in torch.split(rows[order], size)]
    return torch.cat(parts)[order.argsort().to(encoder.device)]


def encoded(encoder: FlatEncoder, inputs: Inputs, task: str, *, size: int = 256, half: bool = False) -> torch.Tensor:
    return encoded_rows(encoder, inputs.pool, inputs.targets[task].rows, size=size, half=half)


def _room(device: torch.device) -> int:
    return free_memory(device) // _SHARE


@dataclass(frozen=True)
class Setting:
    """Arguments of a fitted method, which may change only the encoder's weights.

    On the CPU: `base` [P]; `tuned(task)`: an expert's weights, a new tensor [P]; `merged(method, options)`: a merge
    without data, [P]. `heads`: the experts' own. `inputs`: with targets for every task in the order of `heads`. `half`:
    use bfloat16 autocast. `state`: of a killed run, written at most once per `every` seconds.
    """

    encoder: FlatEncoder
    base: torch.Tensor
    tuned: Callable[[str], torch.Tensor]
    merged: Callable[[str, Mapping[str, Any]], torch.Tensor]
    heads: Mapping[str, Head]
    inputs: Inputs
    seed: int = 0
    half: bool = False
    say: Callable[[str], None] = lambda text: None
    state: RunState | None = None
    every: float = 0.0

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.heads)

    @property
    def layout(self) -> Layout:
        return self.encoder.layout

    @property
    def device(self) -> torch.device:
        return self.encoder.device

    def task_vector(self, task: str) -> torch.Tensor:
        return self.tuned(task).sub_(self.base)

    def task_vectors(self) -> torch.Tensor:
        """All task vectors, [T, P] on the device."""
        vectors = torch.empty(len(self.tasks), self.layout.size, device=self.device)
        for number, task in enumerate(self.tasks):
            vectors[number] = self.task_vector(task)
        return vectors

    def start_vector(self, method: str, options: Mapping[str, Any]) -> torch.Tensor:
        """Task vector of a merge without data, [P] on the device."""
        return (self.merged(method, options) - self.base).to(self.device)

    def mean_expert(self) -> torch.Tensor:
        """Average the experts to [P], exactly if they are equal; refuse one with NaN or infinity."""
        total = torch.zeros(self.layout.size, dtype=torch.float64)
        for task in self.tasks:
            weights = self.tuned(task)
            for name, tensor in self.layout.views(weights):
                if not torch.isfinite(tensor).all():
                    raise NumericalError(
                        f"{name!r} holds NaN or infinity in expert {task!r}; find a sound checkpoint, or leave it out"
                    )
            total += weights
        return (total / len(self.tasks)).float()

    def drawn(self, count: int) -> Inputs:
        """Draw at most `count` inputs of each task, by the seed alone."""
        places = {}
        for task, targets in self.inputs.targets.items():
            if not len(targets):
                raise RecipeError(f"task {task!r} has no inputs; give it at least one")
            order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(self.seed))
            places[task] = order[:count].sort().values
        return self.inputs.at(places)


@dataclass(frozen=True)
class Fitted:
    """Encoder weights [P] and a classifier per task. `facts`: results by name; `curve`: one row per look."""

    weights: torch.Tensor
    classifiers: Mapping[str, Classifier]
    facts: Mapping[str, Any] = field(default_factory=dict)
    curve: tuple[Mapping[str, float], ...] = ()


class FittedMethod(Protocol):
    def fit(self, setting: Setting) -> Fitted: ...
