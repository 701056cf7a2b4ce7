"""Interface of fitted methods, which get an encoder and unlabelled inputs and return weights and heads.

A fitted method is a frozen dataclass whose fields are its options, with `fit(setting) -> Fitted`. Weights are flat
float32 tensors [P]; see `layout`.

Letters: T tasks; n inputs of a task; d features; P elements of the encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from orthomerge.core.errors import NumericalError, RecipeError
from orthomerge.files.run_state import RunState
from orthomerge.fitting.inputs import Inputs
from orthomerge.fitting.layout import FlatEncoder, Layout
from orthomerge.models.heads import Classifier, Head


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
