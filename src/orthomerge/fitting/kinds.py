"""What a fitted method is: it looks at unlabelled inputs through the encoder, and gives back one encoder and its heads.

A fitted method is a small frozen dataclass whose fields are its options, with `fit(setting) -> Fitted`. Weights are
flat tensors [P] in the order of `setting.layout`, float32; see `layout`.

Letters: T tasks; n inputs of a task; d features; P elements of the encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from orthomerge.fitting.inputs import Inputs
    from orthomerge.fitting.layout import FlatEncoder, Layout
    from orthomerge.models.heads import Classifier, Head
    from orthomerge.tuning.state import RunState


@dataclass(frozen=True)
class Setting:
    """What there is to work with, by task where it says so; all of it is to be left as it is found.

    `encoder`: on its device, with whatever weights were loaded last. `base`: [P] on the CPU. `tuned(task)`: an expert's
    weights, [P] on the CPU, read anew every time. `merged(method, options)`: what a merge without data makes, [P] on
    the CPU. `heads`: the experts' own. `inputs`: unlabelled, with the targets of every task, in the order of `heads`.
    `half`: compute in bfloat16 where that is safe (autocast). `say` is told how far the work is; `state`: where a
    killed run can go on from, written every so many seconds (`every`).
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
    every: float | None = None

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.heads)

    @property
    def layout(self) -> Layout:
        return self.encoder.layout

    @property
    def device(self) -> torch.device:
        return self.encoder.device


@dataclass(frozen=True)
class Fitted:
    """One encoder [P] and a classifier a task. `facts`: what was found, by name; `curve`: one row a look."""

    weights: torch.Tensor
    classifiers: Mapping[str, Classifier]
    facts: Mapping[str, Any] = field(default_factory=dict)
    curve: tuple[Mapping[str, float], ...] = ()


class FittedMethod(Protocol):
    """See the module."""

    def fit(self, setting: Setting) -> Fitted: ...
