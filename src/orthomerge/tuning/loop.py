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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from orthomerge.core.adam import rate_share
from orthomerge.core.device import enough_memory
from orthomerge.core.errors import NumericalError
from orthomerge.core.seeds import derive
from orthomerge.files.run_state import RunState
from orthomerge.models.linearised import LinearisedEncoder
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
            for (number, _), batch, labels in run.train.batches(places):
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
                tally.add(step, number, whole, (logits.argmax(1) == labels).sum(), len(labels), penalty)
            tally.look()
            epoch += 1
            scores = evaluate(model, run)
            tally.report(scores)
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
            for _, batch, labels in run.val.ordered(number, run.settings.batch):
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
        seen = [(model.encoding(batch).float(), labels) for _, batch, labels in batches]
    features, labels = torch.cat([part[0] for part in seen]), torch.cat([part[1] for part in seen])
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


@dataclass
class _Tally:
    """Sums over an epoch, kept on the device and looked at now and then."""

    run: Run
    epoch: int
    step: int = 0
    pending: list[tuple[int, int, int, torch.Tensor]] = field(default_factory=list)
    sums: list[list[float]] = field(default_factory=list)  # by task: batches, examples, loss, right, penalty

    def __post_init__(self) -> None:
        self.sums = [[0.0] * 5 for _ in self.run.train.sizes]

    def add(
        self, step: int, number: int, loss: torch.Tensor, right: torch.Tensor, count: int, penalty: torch.Tensor | None
    ) -> None:
        extra = loss.new_zeros(()) if penalty is None else penalty
        self.pending.append((step, number, count, torch.stack([loss, right.to(loss), extra.to(loss)]).detach()))
        self.step = step
        if step % _EVERY == 0:
            self.look()
            self.report({})

    def look(self) -> None:
        """Read what has come in; a loss that is no number ends the run, with the step at which it began."""
        if not self.pending:
            return
        values = torch.stack([entry[3] for entry in self.pending]).tolist()
        for (step, number, count, _), (loss, right, penalty) in zip(self.pending, values, strict=True):
            _check(loss, self.run.title, f"step {step} of {self.run.steps}")
            sums = self.sums[number]
            for at, value in enumerate((1, count, loss, right, penalty)):
                sums[at] += value
        self.pending.clear()

    def report(self, scores: Mapping[int, float]) -> None:
        if self.run.progress is None:
            return
        batches, examples, loss, right, _ = (sum(column) for column in zip(*self.sums, strict=True))
        val = sum(scores.values()) / len(scores) if scores else None
        accuracy = right / max(examples, 1)
        self.run.progress(
            Report(self.run.title, self.epoch, self.step, self.run.steps, loss / max(batches, 1), accuracy, val)
        )

    def metrics(self, scores: Mapping[int, float]) -> list[dict[str, float]]:
        """By task: of the last epoch, training loss and accuracy as they were met, validation accuracy at its end."""
        rows: list[dict[str, float]] = []
        for number, (batches, examples, loss, right, penalty) in enumerate(self.sums):
            values = {"loss": loss / max(batches, 1), "train_accuracy": right / max(examples, 1)}
            if self.run.others.sizes:
                values["penalty"] = penalty / max(batches, 1)
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
