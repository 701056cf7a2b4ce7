"""More inputs from those given: mixtures of two inputs of a task, whose targets are what its expert says of them.

A student that must agree with its teacher on mixtures, too, learns the teacher's function and not a few of its values
(Beyer et al. 2022, arXiv 2106.05237; Zhang et al. 2018, arXiv 1710.09412). No label is involved: a mixture has none,
and needs none.

- Texts: some words of one text in their order, followed by a run of words of another.
- Pictures: a weighted mean of two of the same size, moved by up to an eighth of the side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from orthomerge.data.task import Examples
from orthomerge.fitting.inputs import Inputs, encoded, prepare
from orthomerge.tuning.settings import derive

if TYPE_CHECKING:
    from orthomerge.data.task import Split
    from orthomerge.fitting.kinds import Setting

__all__ = ["mixtures", "with_mixtures"]

_DROPPED = 0.15  # share of a text's words
_PARTNERED = 0.5  # share of mixtures that have a second text


def with_mixtures(
    setting: Setting, inputs: Inputs, counts: Mapping[str, int], held: Inputs | None = None
) -> tuple[Inputs, Inputs | None]:
    """The inputs, followed by so many mixtures of them a task; and those held out, numbered along with them."""
    import torch

    examples, teacher, rows, rest = {}, {}, {}, {}
    split: Split = "train"
    start = 0
    for task in setting.tasks:
        own = list(inputs.raw(task))
        drawn = mixtures(own, counts[task], seed=derive(setting.seed, "mixtures", task))
        known = [inputs.teacher[inputs.rows[task].to(inputs.device)]]
        if drawn:
            made = {task: Examples(drawn, None, split)}
            alone = prepare(made, inputs.processor, {task: torch.zeros(len(drawn), 1)}, device=inputs.device)
            setting.encoder.load(setting.tuned(task))
            known.append(encoded(setting.encoder, alone, task))
        apart = [] if held is None else list(held.raw(task))
        if held is not None:
            known.append(held.teacher[held.rows[task].to(inputs.device)])
        examples[task], teacher[task] = Examples([*own, *drawn, *apart], None, split), torch.cat(known)
        middle = start + len(own) + len(drawn)
        rows[task], rest[task] = torch.arange(start, middle), torch.arange(middle, middle + len(apart))
        start = middle + len(apart)
    whole = prepare(examples, inputs.processor, teacher, device=inputs.device)
    return whole.only(rows), None if held is None else whole.only(rest)


def mixtures(inputs: Sequence[Any], count: int, *, seed: int) -> list[Any]:
    """`count` mixtures, each of the next input in a random order with another at random."""
    if not count or not len(inputs):
        return []
    random = np.random.default_rng(seed)
    order = np.concatenate([random.permutation(len(inputs)) for _ in range(-(-count // len(inputs)))])[:count]
    partners = random.integers(len(inputs), size=count)
    mix = _mixed_text if isinstance(inputs[0], str) else _mixed_picture
    return [mix(inputs[int(one)], inputs[int(other)], random) for one, other in zip(order, partners, strict=True)]


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


def _mixed_picture(one: Any, other: Any, random: np.random.Generator) -> Any:
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
