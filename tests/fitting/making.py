"""Settings of `orthomerge.testing.settings` with variations, and steps of gates, for tests of fitted methods."""

from dataclasses import dataclass, replace

import torch

from orthomerge.core.adam import Optimiser
from orthomerge.fitting.gates import Gates
from orthomerge.fitting.setting import Setting, Targets, encoded_rows
from orthomerge.models.heads import Head, Linear
from orthomerge.testing.settings import CPU, WIDTH, Kind, make_setting

KINDS: list[Kind] = ["bert", "vit"]


def has_hooks(setting: Setting) -> bool:
    """Whether a module of the encoder has hooks."""
    return any(module._forward_pre_hooks or module._forward_hooks for module in setting.encoder.module.modules())


def first_targets(setting: Setting, count: int, start: int = 0) -> dict[str, Targets]:
    """Some targets of each task."""
    return {task: some.at(slice(start, start + count)) for task, some in setting.inputs.targets.items()}


def shared_setting(kind: Kind = "bert", weights: tuple[float, float] = (1.0, 0.3), inputs: int = 6) -> Setting:
    """Every input of `make_setting` as a target of every task: with one weight for its own, another for the others."""
    setting = make_setting(kind, inputs=inputs)
    own, rows = setting.inputs.targets, torch.arange(len(setting.inputs.pool))
    targets = {}
    for task in setting.tasks:
        setting.encoder.load(setting.tuned(task))
        counts = torch.full((len(rows),), weights[1])
        counts[own[task].rows] = weights[0]
        targets[task] = Targets(rows, encoded_rows(setting.encoder, setting.inputs.pool, rows), counts)
    setting.encoder.load(setting.base)
    return replace(setting, inputs=setting.inputs.with_targets(targets))


def with_equal_experts(setting: Setting) -> Setting:
    """All experts are that of `three`."""
    expert = setting.tuned("three")
    return replace(setting, tuned=lambda task: expert.clone())


def with_a_broken_expert(setting: Setting, name: str = "layers.1.attention.q_proj.weight") -> Setting:
    """One tensor of expert `five` is NaN."""

    def tuned(task: str) -> torch.Tensor:
        weights = setting.tuned(task)
        if task == "five":
            weights[setting.layout.places[name]] = float("nan")
        return weights

    return replace(setting, tuned=tuned)


def average(setting: Setting) -> torch.Tensor:
    """The mean of the experts, [P]."""
    return torch.stack([setting.tuned(task) for task in setting.tasks]).mean(0)


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """Normal numbers of a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hidden(head: Head) -> Head:
    layer = Linear(0.3 * numbers(0, WIDTH, WIDTH), numbers(1, WIDTH))
    return replace(head, hidden=layer, activation="tanh")


def normal(head: Head) -> Head:
    return replace(head, output=Linear(10 * head.output.weight), normalise=True)


def features_of(setting: Setting, scale: float = 1.0) -> dict[str, torch.Tensor]:
    return dict(zip(setting.tasks, scale * numbers(1, 3, 5, WIDTH), strict=True))


@dataclass
class Steps:
    """Steps of gates as the training loop takes them, and the weights [P] after the last one."""

    gates: Gates
    size: int
    count: int = 0

    def __post_init__(self) -> None:
        self.weights, self.optimiser = torch.empty(self.size), Optimiser(self.gates.groups, CPU)
        self.gates.write(self.weights)

    def take(self, gradient: torch.Tensor, share: float = 1.0) -> torch.Tensor:
        """One step against the gradient [P] of the weights, at a share of the full rate."""
        self.gates.backward(gradient.clone(), self.count)
        self.optimiser.step(share)
        self.count += 1
        self.gates.write(self.weights, self.count)
        return self.weights
