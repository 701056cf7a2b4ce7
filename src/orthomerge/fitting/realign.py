"""Realign: distil one encoder from the experts, and solve heads for it.

From a merge without data, in stages; the result is the stage with the least loss on held-out inputs:

1. heads: solved for the merged encoder by an aligner (`solver`), as `orthomerge align` does;
2. encoder: trained to minimise KL(expert || merged) under these heads. The trained values (`gates`) are all weights
   (free) or a mask over the merged vector (mask);
3. heads: solved again, for the trained encoder.

If inputs are few, mixtures of two inputs of a task are added (`copies`; Beyer et al. 2022, arXiv 2106.05237; Zhang et
al. 2018, arXiv 1710.09412). Texts: some words of one in their order, followed by consecutive words of another. Images:
a weighted mean of two, shifted by up to an eighth of the side.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import torch

from orthomerge.alignment.aligners import find_aligner, make_aligner
from orthomerge.core.checks import not_negative
from orthomerge.core.device import derive
from orthomerge.core.errors import RecipeError
from orthomerge.data.task import Examples
from orthomerge.fitting.gates import Free, Gates, Mask
from orthomerge.fitting.loop import Loop, check_loop, held_out_loss
from orthomerge.fitting.objective import Divergence
from orthomerge.fitting.setting import Fitted, Inputs, Setting, Targets, encoded, encoded_rows
from orthomerge.models.features import FeaturePair, Features
from orthomerge.models.heads import Head
from orthomerge.models.prepared import Part

Heads = Mapping[str, Head]

_MASK_RATE = 0.1
_FREE_RATE = 0.15  # learning rate of free weights, as a share of the mean change by fine-tuning
_ENOUGH = 2000  # inputs of a task, with mixtures
_MIXTURES = 100  # per input, at most
_FEW = 100  # inputs of a task below which none is held out
_HELD_OUT = 200  # mixtures that are then held out instead
_PER_CLASS = 4  # inputs from which heads are solved on mixtures too
_MANY = 10  # inputs per class from which every weight is trained
_DROPPED = 0.15  # share of a text's words that a mixture drops
_PARTNERED = 0.5  # share of mixtures that have a second text
_ON_DEVICE = ("auto", "kl-map")  # solvers that can use a GPU


@dataclass(frozen=True)
class Realign:
    """See the module. `start`, `options`: the merge to start from. `cap`: of the mask, in multiples of that merge.

    `gates`: auto is free, or mask with fewer than 10 inputs per class. `lr`: of the gates; auto is 0.1 for a mask, and
    for free weights 0.15 of the root mean square change of the experts' weights.
    `read_by`: the heads of stage 2, the solved ones or the experts' own; `head_lr`: their learning rate. `decay`:
    of free weights towards the merge, or of the squared mask. `copies`: number of inputs per task up to which mixtures
    are added; auto is 2000, at most 100 of an input. `patience`: looks without a better held-out loss before stage 2
    ends; 0 for no limit.
    """

    start: str = "task_arithmetic"
    options: dict[str, Any] = field(default_factory=dict)
    gates: Literal["auto", "free", "mask"] = "auto"
    read_by: Literal["solved", "expert"] = "solved"
    solver: str = "auto"
    steps: int = 1000
    batch: int = 16
    lr: float | Literal["auto"] = "auto"
    head_lr: float = 0.0
    decay: float = 0.0
    cap: float = 4.0
    copies: int | Literal["auto"] = "auto"
    hold_out: float = 0.1
    look: int = 100
    patience: int = 0
    checkpointing: bool = False

    def __post_init__(self) -> None:
        check_loop(steps=self.steps, batch=self.batch, lr=1.0 if self.lr == "auto" else self.lr, hold_out=self.hold_out)
        if self.cap <= 1:
            raise RecipeError(f"'cap' must be above 1, got {self.cap}; the mask starts at 1")
        not_negative(head_lr=self.head_lr, decay=self.decay, copies=0 if self.copies == "auto" else self.copies)
        if find_aligner(self.solver).extra:
            raise RecipeError(f"{self.solver!r} adds parameters to a head; name an aligner that does not, such as auto")

    def fit(self, setting: Setting) -> Fitted:
        encoder = setting.encoder
        merged = setting.base.to(setting.device) + setting.start_vector(self.start, self.options)
        fitted, held, solvable = self._inputs(setting)
        stages: dict[str, Heads] = {}
        losses: dict[str, float] = {}

        def judge(stage: str, heads: Heads) -> None:
            stages[stage] = heads
            if held is not None:
                losses[stage] = held_out_loss(setting, Divergence(heads, setting.heads, setting.device), held)

        def best() -> str:
            return min(losses, key=lambda stage: losses[stage]) if losses else list(stages)[-1]

        encoder.load(merged)
        judge("merged", setting.heads)
        judge("solved", solve_heads(setting, solvable, self.solver))

        first = stages["solved"] if self.read_by == "solved" and best() == "solved" else setting.heads
        objective = Divergence(first, setting.heads, setting.device, lr=self.head_lr)
        gates = self._gates(setting, merged)
        loop = Loop(
            steps=self.steps,
            batch=self.batch,
            warmup=0.05,
            look=self.look,
            best=held is not None,
            patience=self.patience,
            checkpointing=self.checkpointing,
        )
        course = loop.run(setting, gates, objective, fitted, held)
        judge("trained", objective.classifiers())
        judge("solved again", solve_heads(setting, solvable, self.solver))

        kept = best()
        if kept in ("merged", "solved"):
            encoder.load(merged)
        facts = {
            "kept": kept,
            "held_out": losses,
            "best_step": course.best_step,
            "trained": gates.size,
            "mixtures": _count(fitted) - _count(setting.inputs),
            **gates.measures(),
        }
        return Fitted(encoder.weights.cpu().clone(), stages[kept], facts, tuple(course.rows))

    def _inputs(self, setting: Setting) -> tuple[Inputs, Inputs | None, Inputs]:
        """Return inputs to train on, held-out ones, and the targets of largest weight: aligners do not use weights."""
        inputs, held = setting.inputs.divided(self.hold_out, seed=setting.seed, fewest=_FEW)
        sizes = {task: len(targets) for task, targets in inputs.targets.items()}
        counts = {task: self._mixtures(size) for task, size in sizes.items()}
        if not any(counts.values()):
            most = {task: _of_most_weight(targets) for task, targets in inputs.targets.items()}
            return inputs, held, inputs.with_targets(most)
        apart_counts = {task: 0 if size >= _FEW else _HELD_OUT for task, size in sizes.items()}
        mixed = with_mixtures(setting, inputs, {task: counts[task] + apart_counts[task] for task in counts})
        fitted, apart, solvable = {}, {}, {}
        for task, targets in mixed.targets.items():
            end = len(targets) - apart_counts[task]
            fitted[task], apart[task] = targets.at(slice(end)), targets.at(slice(end, None))
            if held is not None:
                apart[task] = held.targets[task].followed_by(apart[task])
            many = sizes[task] >= _PER_CLASS * len(setting.heads[task].labels)
            solvable[task] = _of_most_weight(targets.at(slice(end if many else sizes[task])))
        held = mixed.with_targets(apart) if self.hold_out else None
        return mixed.with_targets(fitted), held, mixed.with_targets(solvable)

    def _mixtures(self, count: int) -> int:
        if self.copies == "auto":
            return min(max(_ENOUGH - count, 0), _MIXTURES * count)
        return max(self.copies - count, 0)

    def _gates(self, setting: Setting, merged: torch.Tensor) -> Gates:
        many = _count(setting.inputs) >= _MANY * sum(len(head.labels) for head in setting.heads.values())
        if self.gates == "free" or (self.gates == "auto" and many):
            rate = _FREE_RATE * _mean_change(setting) if self.lr == "auto" else self.lr
            return Free(merged, lr=rate, decay=self.decay)
        rate = _MASK_RATE if self.lr == "auto" else self.lr
        base = setting.base.to(setting.device)
        return Mask(base, merged - base, cap=self.cap, start=1 / self.cap, lr=rate, penalty=self.decay)


def solve_heads(setting: Setting, inputs: Inputs, solver: str) -> dict[str, Head]:
    heads = {}
    options = {"device": str(setting.device)} if solver in _ON_DEVICE else {}
    for task in setting.tasks:
        student = Features(encoded(setting.encoder, inputs, task).cpu(), task, "train")
        teacher = Features(inputs.targets[task].features.cpu(), task, "train")
        solved = make_aligner(solver, options).fit(FeaturePair(student, teacher), setting.heads[task])
        heads[task] = cast("Head", solved.classifier)
    return heads


def _of_most_weight(targets: Targets) -> Targets:
    if not len(targets):
        return targets
    return targets.at((targets.weights == targets.weights.max()).nonzero().flatten().cpu())


def _count(inputs: Inputs) -> int:
    return sum(map(len, inputs.targets.values()))


def _mean_change(setting: Setting) -> float:
    """Root mean square of each task vector over its nonzero elements, averaged over tasks."""
    changes = []
    for task in setting.tasks:
        vector = setting.task_vector(task)
        length = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
        changes.append(length / math.sqrt(max(int(np.count_nonzero(vector.numpy())), 1)))
    return max(sum(changes) / len(changes), 1e-8)


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
