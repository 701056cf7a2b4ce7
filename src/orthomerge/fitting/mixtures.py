"""Augment the inputs of a fit by mixtures of two inputs of a task; their targets are the expert's features.

Beyer et al. 2022, arXiv 2106.05237; Zhang et al. 2018, arXiv 1710.09412. Texts: some words of one in their order,
followed by consecutive words of another. Images: a weighted mean of two, shifted by up to an eighth of the side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from orthomerge.core.device import derive
from orthomerge.data.task import Examples
from orthomerge.fitting.inputs import Inputs, Targets, encoded_rows
from orthomerge.fitting.setting import Setting
from orthomerge.models.prepared import Part

_DROPPED = 0.15  # share of a text's words that are dropped
_PARTNERED = 0.5  # share of mixtures that have a second text


def with_mixtures(setting: Setting, inputs: Inputs, counts: Mapping[str, int]) -> Inputs:
    """Append `counts` mixtures to the inputs of every task; a mixture has the weight of its first input."""
    parts: list[Part] = []
    firsts: dict[str, list[int]] = {}
    for task in setting.tasks:
        mixed, first = mixtures(inputs.raw(task), counts[task], seed=derive(setting.seed, "mixtures", task))
        if mixed:
            parts.append(Part(Examples(mixed, None, "train"), inputs.processors[task]))
            firsts[task] = first
    whole, start = inputs.extended(parts) if parts else inputs, len(inputs.pool)
    targets = dict(inputs.targets)
    for task, first in firsts.items():
        rows = torch.arange(start, start + len(first))
        start += len(first)
        setting.encoder.load(setting.tuned(task))
        weights = targets[task].weights[torch.tensor(first, device=setting.device)]
        more = Targets(rows, encoded_rows(setting.encoder, whole.pool, rows), weights)
        targets[task] = targets[task].followed_by(more)
    return whole.with_targets(targets)


def mixtures(inputs: Sequence[Any], count: int, *, seed: int) -> tuple[list[Any], list[int]]:
    """Mix random pairs of inputs `count` times; return the mixtures, and the place of each one's first input."""
    if not count or not len(inputs):
        return [], []
    random = np.random.default_rng(seed)
    order = np.concatenate([random.permutation(len(inputs)) for _ in range(-(-count // len(inputs)))])[:count]
    partners = random.integers(len(inputs), size=count)
    mix = _mixed_text if isinstance(inputs[0], str) else _mixed_image
    mixed = [mix(inputs[int(one)], inputs[int(other)], random) for one, other in zip(order, partners, strict=True)]
    return mixed, order.tolist()


def _mixed_text(one: str, other: str, random: np.random.Generator) -> str:
    words = one.split()
    kept = [word for word in words if random.random() >= _DROPPED] or words
    if random.random() >= _PARTNERED:
        return " ".join(kept)
    more = other.split()
    length = int(random.integers(1, max(len(more), 1) + 1))
    first = int(random.integers(0, max(len(more) - length, 0) + 1))
    start = int(random.integers(0, max(len(kept) // 2, 1)))
    return " ".join([*kept[start:], *more[first : first + length]])


def _mixed_image(one: Any, other: Any, random: np.random.Generator) -> Any:
    picture = np.asarray(one)
    second = np.asarray(other)
    if second.shape == picture.shape:
        share = random.beta(1.0, 1.0)
        picture = np.rint(share * picture + (1 - share) * second).astype(picture.dtype)
    height, width = picture.shape[:2]
    down, right = (int(random.integers(-(side // 8), side // 8 + 1)) for side in (height, width))
    rows = np.clip(np.arange(height) - down, 0, height - 1)
    columns = np.clip(np.arange(width) - right, 0, width - 1)
    return picture[rows][:, columns]
