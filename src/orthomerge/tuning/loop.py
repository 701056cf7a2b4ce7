"""The training loop: AdamW, linear warm-up then cosine, clipped gradients; one loop for one task or for many.

Loss: cross-entropy. With `tau_jp` (Yoshida et al. 2025, ICLR) plus `penalty` times the batch mean of ||J(x') tau||_2,
where x' are unlabelled inputs of other tasks, one of the tasks a step in turn; J(x') tau [B, d] is the change that the
task vector makes there, which is what another task suffers when the vectors are added.

Differs from the paper: the norm is sqrt(sum of squares + eps), for it has no gradient at tau = 0; the other tasks'
inputs are those given, without ImageNet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from orthomerge.core.adam import rate_share
from orthomerge.core.device import derive, enough_memory
from orthomerge.core.errors import NumericalError
from orthomerge.files.run_state import RunState
from orthomerge.models.networks import LinearisedEncoder
from orthomerge.tuning.batches import Feed, epoch_order, moved, sample
from orthomerge.tuning.model import Model
from orthomerge.tuning.settings import LINEARISED, Tuning

_EVERY = 10  # steps between looks at the loss: each one makes the processor wait for the GPU
_EPS = 1e-12


@dataclass(frozen=True)
class Report:
    """How far a run is; loss and accuracy are means over the epoch so far, `val_accuracy` comes at its end."""

    task: str
    epoch: int
    step: int
    steps: int
    loss: float
    accuracy: float
    val_accuracy: float | None = None


Progress = Callable[[Report], None]


@dataclass(frozen=True)
class Outcome:
    """Metrics by task number."""

    steps: int
    metrics: list[dict[str, float]]


@dataclass(frozen=True)
class Run:
    """What a loop needs beside the model. `val`: sources may be empty; `others`: without sources but for `tau_jp`."""

    title: str
    settings: Tuning
    device: torch.device
    train: Feed
    val: Feed
    others: Feed
    progress: Progress | None = None
    state: RunState | None = None

    @property
    def steps(self) -> int:
        return count_steps(self.settings, self.train.sizes)

    def autocast(self) -> AbstractContextManager[object]:
        """Mixed precision where it was asked for and there is a GPU."""
        settings = self.settings
        enabled = settings.precision == "bfloat16" and self.device.type == "cuda"
        # Casts of dual numbers must not be kept from one pass to the next.
        cache = settings.mode not in LINEARISED
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=enabled, cache_enabled=cache)


def count_steps(settings: Tuning, sizes: Sequence[int]) -> int:
    """How many steps a run takes on tasks of these sizes."""
    steps = math.ceil(settings.epochs * sum(-(-size // settings.batch) for size in sizes))
    return min(steps, settings.steps or steps)


def train(model: Model, run: Run, saved: Mapping[str, Any] | None = None) -> Outcome:
    """Train what requires a gradient; `saved`: where a killed run of the same settings stood."""
    settings, steps = run.settings, run.steps
    optimiser, rates = _optimiser(model, run)
    trained = [parameter for _, parameter in _named(model)]
    epoch = step = 0
    if saved is not None:
        epoch, step = saved["epoch"], saved["step"]
        _restore(model, saved["weights"])
        optimiser.load_state_dict(saved["optimiser"])
    outcome = Outcome(steps, [])
    with _enough_memory(settings):
        while step < steps:
            torch.manual_seed(derive(settings.seed, "dropout", epoch))  # from here on, alike in a resumed run
            tally = _Tally(run, epoch + 1)
            model.train()
            places = epoch_order(run.train.sizes, settings.batch, seed=settings.seed, epoch=epoch)[: steps - step]
            for number, rows in places:
                batch, labels = run.train.batch((number, rows))
                _set_rates(optimiser, rates, rate_share(step, steps, warmup=settings.warmup))
                shown = batch if settings.augment == "none" else moved(batch, seed=settings.seed, step=step)
                with run.autocast():
                    logits = model(shown, number).float()
                    loss = nn.functional.cross_entropy(logits, labels)
                    penalty = _penalty(model, run, step)
                whole = loss if penalty is None else loss + settings.penalty * penalty
                optimiser.zero_grad(set_to_none=True)
                whole.backward()  # type: ignore[no-untyped-call]
                if settings.clip:
                    nn.utils.clip_grad_norm_(trained, settings.clip)
                optimiser.step()
                step += 1
                right = (logits.argmax(1) == labels).sum()
                tally.add(number, len(labels), whole, right, torch.zeros_like(loss) if penalty is None else penalty)
                if step % _EVERY == 0:
                    tally.report(step, {})
            epoch += 1
            scores = evaluate(model, run)
            tally.report(step, scores)
            outcome = Outcome(steps, tally.metrics(scores))
            if run.state is not None and step < steps:
                weights = {name: tensor.detach() for name, tensor in _named(model)}
                run.state.write({"epoch": epoch, "step": step, "weights": weights, "optimiser": optimiser.state_dict()})
    # The loss was that before the last step.
    if not all(bool(parameter.isfinite().all()) for parameter in trained):
        raise NumericalError(f"task {run.title!r}: weights are no numbers after step {steps} of {steps}; lower 'lr'")
    return outcome


def evaluate(model: Model, run: Run) -> dict[int, float]:
    """Accuracy of every task that has a validation split, by its number."""
    model.eval()
    scores = {}
    with torch.no_grad(), run.autocast():
        for number, size in enumerate(run.val.sizes):
            if not size:
                continue
            right = torch.zeros((), dtype=torch.int64, device=run.device)
            for batch, labels in run.val.ordered(number, run.settings.batch):
                right += (model(batch, number).argmax(1) == labels).sum()
            scores[number] = int(right) / size
    return scores


def fit_head(model: Model, run: Run, number: int) -> None:
    """Train a head alone, on features of the encoder as it is (Kumar et al. 2022, arXiv 2202.10054)."""
    settings, size = run.settings, run.train.sizes[number]
    per_epoch = -(-size // settings.batch)
    steps = math.ceil(settings.head_epochs * per_epoch)
    if not steps:
        return
    model.eval()
    with _enough_memory(settings), torch.no_grad(), run.autocast():
        batches = run.train.ordered(number, settings.batch)
        seen = [(model.encoding(batch).float(), labels) for batch, labels in batches]
    features, labels = (torch.cat(parts) for parts in zip(*seen, strict=True))
    head = model.heads[number]
    optimiser = torch.optim.AdamW(head.parameters(), lr=settings.head_lr, weight_decay=settings.weight_decay)
    for step in range(steps):
        epoch, at = divmod(step, per_epoch)
        if at == 0:
            order = epoch_order([size], settings.batch, seed=derive(settings.seed, "head", number), epoch=epoch)
        rows = torch.as_tensor(order[at][1], device=features.device)
        _set_rates(optimiser, [settings.head_lr], rate_share(step, steps, warmup=settings.warmup))
        loss = nn.functional.cross_entropy(head(features[rows]), labels[rows])
        if step % _EVERY == 0 or step + 1 == steps:
            _check(loss.item(), run.title, f"step {step + 1} of {steps} of the head's own")
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    optimiser.zero_grad(set_to_none=True)


class _Tally:
    """Counts and sums over an epoch by task; the sums, of loss, right answers and penalty, are on the device."""

    def __init__(self, run: Run, epoch: int) -> None:
        self._run, self._epoch = run, epoch
        self._batches, self._examples = ([0] * len(run.train.sizes) for _ in range(2))
        self._sums = torch.zeros(len(run.train.sizes), 3, dtype=torch.float64, device=run.device)

    def add(self, number: int, count: int, *values: torch.Tensor) -> None:
        self._batches[number] += 1
        self._examples[number] += count
        self._sums[number] += torch.stack([value.detach().double() for value in values])

    def report(self, step: int, scores: Mapping[int, float]) -> None:
        """Say how far the run is; a loss that is no number ends it."""
        loss, right, _ = self._sums.sum(0).tolist()
        _check(loss, self._run.title, f"step {step} of {self._run.steps}")
        if self._run.progress is not None:
            val = sum(scores.values()) / len(scores) if scores else None
            means = loss / max(sum(self._batches), 1), right / max(sum(self._examples), 1)
            self._run.progress(Report(self._run.title, self._epoch, step, self._run.steps, *means, val))

    def metrics(self, scores: Mapping[int, float]) -> list[dict[str, float]]:
        """By task: of the last epoch, training loss and accuracy as they were met, validation accuracy at its end."""
        rows: list[dict[str, float]] = []
        for number, (loss, right, penalty) in enumerate(self._sums.tolist()):
            batches = max(self._batches[number], 1)
            values = {"loss": loss / batches, "train_accuracy": right / max(self._examples[number], 1)}
            if self._run.others.sizes:
                values["penalty"] = penalty / batches
            if number in scores:
                values["val_accuracy"] = scores[number]
            rows.append(values)
        return rows


def _penalty(model: Model, run: Run, step: int) -> torch.Tensor | None:
    """Batch mean of ||J(x') tau||_2 on inputs of another task."""
    if not run.others.sizes or not isinstance(model.encoding, LinearisedEncoder):
        return None
    number = step % len(run.others.sizes)
    rows = sample(run.others.sizes[number], run.settings.penalty_batch, seed=run.settings.seed, step=step)
    batch, _ = run.others.batch((number, rows))
    change = model.encoding.change(batch).float()
    return (change.square().sum(1) + _EPS).sqrt().mean()


def _optimiser(model: Model, run: Run) -> tuple[torch.optim.Optimizer, list[float]]:
    """AdamW over four groups: encoder and head, with decay (matrices) and without (vectors)."""
    settings = run.settings
    head_rate = settings.lr if settings.mode == "head_first" else settings.head_lr
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in _named(model):
        rate = head_rate if name.startswith("heads.") else settings.lr
        decay = settings.weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault((rate, decay), []).append(parameter)
    listed = [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in groups.items()]
    optimiser = torch.optim.AdamW(listed, fused=run.device.type == "cuda")
    return optimiser, [rate for rate, _ in groups]


def _set_rates(optimiser: torch.optim.Optimizer, rates: Sequence[float], factor: float) -> None:
    for group, rate in zip(optimiser.param_groups, rates, strict=True):
        group["lr"] = rate * factor


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def _restore(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in _named(model):
            parameter.copy_(weights[name])


def _check(loss: float, title: str, where: str) -> None:
    if not math.isfinite(loss):
        raise NumericalError(
            f"task {title!r}: the loss is {loss} at {where}; lower 'lr' and 'head_lr', or look for inputs that are "
            "no numbers"
        )


def _enough_memory(settings: Tuning) -> AbstractContextManager[None]:
    return enough_memory(f"batches of {settings.batch}", "lower 'batch'")
