"""Training loop for one or several tasks: AdamW, linear warm-up, then cosine, clipped gradients.

Loss: cross-entropy. With `tau_jp` (Yoshida et al. 2025, ICLR) plus `penalty` times the batch mean of ||J(x') tau||_2:
x' are unlabelled inputs of another task, J(x') tau [B, d] is the change of their features by the task vector.
Differs from the paper: the norm is sqrt(sum of squares + eps), as it has no gradient at tau = 0; no ImageNet inputs.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from orthomerge.core.adam import Optimiser, rate_share
from orthomerge.core.device import derive, device_of, enough_memory, free_memory
from orthomerge.core.errors import NumericalError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.data.task import Examples, Task
from orthomerge.files.run_state import RunState
from orthomerge.models.networks import LinearisedEncoder
from orthomerge.models.processing import Processor
from orthomerge.tuning.batches import Feed, epoch_order, sample, shifted
from orthomerge.tuning.model import Model
from orthomerge.tuning.settings import LINEARISED, Tuning

_EVERY = 10  # steps between two reports, each of which waits for the GPU
_EPS = 1e-12
_ROOM = 2 << 30  # bytes for processed inputs, at most


@dataclass(frozen=True)
class Run:
    """Labelled tasks to train on, and inputs of other tasks for `tau_jp`."""

    title: str
    tasks: Sequence[Task]
    settings: Tuning
    processor: Processor
    others: Sequence[Examples] = ()
    progress: Progress = SILENT

    @cached_property
    def device(self) -> torch.device:
        return device_of(self.settings.device)

    @cached_property
    def train(self) -> Feed:
        return self._feed([task["train"] for task in self.tasks], self.settings.batch)

    @cached_property
    def val(self) -> Feed:
        """Validation splits by task, empty where there is none."""
        empty = Examples([], None, "val")
        return self._feed([task["val"] if "val" in task.splits else empty for task in self.tasks], self.settings.batch)

    @cached_property
    def unlabelled(self) -> Feed:
        parts = [part for part in self.others if len(part)] if self.settings.mode == "tau_jp" else []
        return self._feed(parts, self.settings.penalty_batch)

    def _feed(self, sources: Sequence[Examples], batch: int) -> Feed:
        # Inputs that are used less than once each need not be kept.
        often = self.steps * batch >= sum(map(len, sources))
        room = min(_ROOM, free_memory(self.device) // 4) if often else 0
        return Feed(sources, self.processor, self.device, room=room)

    @cached_property
    def steps(self) -> int:
        settings = self.settings
        steps = math.ceil(settings.epochs * sum(-(-len(task["train"]) // settings.batch) for task in self.tasks))
        return min(steps, settings.steps or steps)

    def autocast(self) -> AbstractContextManager[object]:
        settings = self.settings
        enabled = settings.precision == "bfloat16" and self.device.type == "cuda"
        # Casts of dual numbers must not be cached between passes.
        cache = settings.mode not in LINEARISED
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=enabled, cache_enabled=cache)

    def enough_memory(self) -> AbstractContextManager[None]:
        return enough_memory(f"batches of {self.settings.batch}", "lower 'batch'")

    def check(self, loss: float, where: str) -> None:
        if not math.isfinite(loss):
            raise NumericalError(
                f"task {self.title!r}: the loss is {loss} at {where}; lower 'lr' and 'head_lr', or check the inputs "
                "for NaN and infinity"
            )


def train(model: Model, run: Run, state: RunState | None, saved: Mapping[str, Any] | None) -> list[dict[str, float]]:
    """Train what requires gradients, and return the metrics of the last epoch by task; `saved`: of a killed run."""
    settings, steps = run.settings, run.steps
    optimiser = _optimiser(model, run)
    epoch = step = 0
    metrics: list[dict[str, float]] = []
    if saved is not None:
        epoch, step = saved["epoch"], saved["step"]
        optimiser.load(saved["optimiser"])
    with run.enough_memory():
        while step < steps:
            torch.manual_seed(derive(settings.seed, "dropout", epoch))  # also makes a resumed run reproducible
            tally = _Tally(run, epoch + 1)
            model.train()
            order = epoch_order(run.train.sizes, settings.batch, seed=settings.seed, epoch=epoch)
            for number, rows in order[: steps - step]:
                batch, labels = run.train.batch(number, rows)
                if settings.augment == "shift":
                    batch = shifted(batch, seed=settings.seed, step=step)
                with run.autocast():
                    logits = model(batch, number).float()
                    penalty = _penalty(model, run, step)
                    loss = nn.functional.cross_entropy(logits, labels) + settings.penalty * penalty
                loss.backward()  # type: ignore[no-untyped-call]
                if settings.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
                optimiser.step(rate_share(step, steps, warmup=settings.warmup))
                step += 1
                tally.add(number, len(labels), loss, (logits.argmax(1) == labels).sum(), penalty)
                if step % _EVERY == 0:
                    tally.report(step, {})
            epoch += 1
            scores = evaluate(model, run)
            tally.report(step, scores)
            metrics = tally.metrics(scores)
            if state is not None and step < steps:
                state.write({"epoch": epoch, "step": step, "optimiser": optimiser.state()})
    # The last loss was computed before the last step.
    if not all(bool(value.isfinite().all()) for value in optimiser.values):
        raise NumericalError(f"task {run.title!r}: weights are not finite after step {steps} of {steps}; lower 'lr'")
    return metrics


def evaluate(model: Model, run: Run) -> dict[int, float]:
    """Return the accuracy of every task with a validation split, by its number."""
    model.eval()
    scores = {}
    with torch.no_grad(), run.autocast():
        for number, size in enumerate(run.val.sizes):
            if not size:
                continue
            correct = torch.zeros((), dtype=torch.int64, device=run.device)
            for batch, labels in run.val.ordered(number, run.settings.batch):
                correct += (model(batch, number).argmax(1) == labels).sum()
            scores[number] = int(correct) / size
    return scores


def fit_head(model: Model, run: Run, number: int) -> None:
    """Train a head alone, on features of the untrained encoder (Kumar et al. 2022, arXiv 2202.10054)."""
    settings, size = run.settings, run.train.sizes[number]
    per_epoch = -(-size // settings.batch)
    steps = math.ceil(settings.head_epochs * per_epoch)
    if not steps:
        return
    model.eval()
    with run.enough_memory(), torch.no_grad(), run.autocast():
        encoded = [
            (model.encoding(batch).float(), labels) for batch, labels in run.train.ordered(number, settings.batch)
        ]
    features, labels = (torch.cat(parts) for parts in zip(*encoded, strict=True))
    head = model.heads[number]
    optimiser = Optimiser(
        [{"params": [*head.parameters()], "lr": settings.head_lr, "weight_decay": settings.weight_decay}], run.device
    )
    for step in range(steps):
        epoch, position = divmod(step, per_epoch)
        if position == 0:
            order = epoch_order([size], settings.batch, seed=derive(settings.seed, "head", number), epoch=epoch)
        rows = order[position][1].to(features.device)
        loss = nn.functional.cross_entropy(head(features[rows]), labels[rows])
        if step % _EVERY == 0 or step + 1 == steps:
            run.check(loss.item(), f"step {step + 1} of {steps} of the head's own")
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step(rate_share(step, steps, warmup=settings.warmup))


class _Tally:
    """Sums over an epoch by task: batches and examples; on the device loss, correct predictions and penalty."""

    def __init__(self, run: Run, epoch: int) -> None:
        count = len(run.train.sizes)
        self._run, self._epoch = run, epoch
        self._batches, self._examples = [0] * count, [0] * count
        self._sums = torch.zeros(count, 3, dtype=torch.float64, device=run.device)

    def add(self, number: int, count: int, *values: torch.Tensor) -> None:
        self._batches[number] += 1
        self._examples[number] += count
        self._sums[number] += torch.stack([value.detach().double() for value in values])

    def report(self, step: int, scores: Mapping[int, float]) -> None:
        loss, correct, _ = self._sums.sum(0).tolist()
        place = f"step {step} of {self._run.steps}"
        self._run.check(loss, place)
        figures = {"loss": loss / sum(self._batches), "accuracy": correct / sum(self._examples)}
        if scores:
            figures["val_accuracy"] = sum(scores.values()) / len(scores)
        text = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        self._run.progress.say(f"{self._run.title}, epoch {self._epoch}, {place}: {text}")

    def metrics(self, scores: Mapping[int, float]) -> list[dict[str, float]]:
        """Return the metrics by task: loss and accuracy during the epoch, validation accuracy at its end."""
        rows: list[dict[str, float]] = []
        for number, (loss, correct, penalty) in enumerate(self._sums.tolist()):
            batches = max(self._batches[number], 1)
            values = {"loss": loss / batches, "train_accuracy": correct / max(self._examples[number], 1)}
            if self._run.unlabelled.sizes:
                values["penalty"] = penalty / batches
            if number in scores:
                values["val_accuracy"] = scores[number]
            rows.append(values)
        return rows


def _penalty(model: Model, run: Run, step: int) -> torch.Tensor:
    """Batch mean of ||J(x') tau||_2 on inputs of another task; 0 without other tasks."""
    sizes = run.unlabelled.sizes
    if not sizes or not isinstance(model.encoding, LinearisedEncoder):
        return torch.zeros((), device=run.device)
    number = step % len(sizes)
    rows = sample(sizes[number], run.settings.penalty_batch, seed=run.settings.seed, step=step)
    batch, _ = run.unlabelled.batch(number, rows)
    change = model.encoding.change(batch).float()
    return (change.square().sum(1) + _EPS).sqrt().mean()


def _optimiser(model: Model, run: Run) -> Optimiser:
    """AdamW over four groups: encoder and head, with decay (matrices) and without (vectors)."""
    settings = run.settings
    head_rate = settings.lr if settings.mode == "head_first" else settings.head_lr
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        rate = head_rate if name.startswith("heads.") else settings.lr
        decay = settings.weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault((rate, decay), []).append(parameter)
    return Optimiser(
        [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in groups.items()], run.device
    )
