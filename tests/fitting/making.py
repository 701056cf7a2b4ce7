"""What tests of fitted methods do with a setting of `orthomerge.testing.settings`."""

from __future__ import annotations

from dataclasses import replace

import torch

from orthomerge.fitting.inputs import Targets, encoded_rows
from orthomerge.fitting.setting import Setting
from orthomerge.testing.settings import Kind, make_setting


def has_hooks(setting: Setting) -> bool:
    """Whether anything still listens to a module of the encoder."""
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


def numbers(seed: int, size: int) -> torch.Tensor:
    """Normal numbers of a seed."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))
