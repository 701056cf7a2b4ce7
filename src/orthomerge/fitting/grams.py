"""Second moments of the inputs of an encoder's linear layers, and least squares with them.

A layer is a weight [m, k] of one or more `nn.Linear`. Its inputs are rows x [k]: every token of every input, without
padding. G = mean over rows of w x x^T, [k, k] in float64 on the device, w being the weight of the input. A linear
weight that another kind of module shares does not count, nor does `nn.MultiheadAttention`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from orthomerge.core.errors import IncompatibleError, NumericalError
from orthomerge.fitting.setting import Inputs, Setting

Layers = Mapping[str, Sequence[nn.Linear]]

_SIZE = 64  # inputs in a batch
_SINGULAR = 1e-12  # share of the largest eigenvalue below which an eigenvalue may be rounding


def linear_layers(encoder: nn.Module) -> dict[str, tuple[nn.Linear, ...]]:
    """Return the modules of every linear weight, by the weight's name."""
    names = {id(parameter): name for name, parameter in encoder.named_parameters()}
    layers: dict[str, tuple[nn.Linear, ...]] = {}
    others: set[str] = set()
    for module in encoder.modules():
        if isinstance(module, nn.Linear):
            name = names[id(module.weight)]
            layers[name] = (*layers.get(name, ()), module)
        else:
            others |= {names[id(parameter)] for parameter in module.parameters(recurse=False)}
    return {name: modules for name, modules in layers.items() if name not in others}


@contextmanager
def watching(layers: Layers, record: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Call `record` with the name and the input of a layer whenever one is called."""

    def hook(name: str, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        record(name, args[0] if args else named["input"])

    handles = [
        module.register_forward_pre_hook(partial(hook, name), with_kwargs=True)
        for name, modules in layers.items()
        for module in modules
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def called(setting: Setting, inputs: Inputs) -> tuple[str, ...]:
    """Return the names of the layers that a forward pass calls, in order; refuse an encoder that calls none."""
    calls: list[str] = []
    with watching(linear_layers(setting.encoder.module), lambda name, _: calls.append(name)):
        setting.encoder.features(inputs.pool.batch(inputs.targets[setting.tasks[0]].rows[:1]))
    if not calls:
        raise IncompatibleError(
            "the encoder calls no nn.Linear, so there is nothing to solve for; merge it with 'average' or 'fisher'"
        )
    return tuple(calls)


@torch.no_grad()
def grams(setting: Setting, inputs: Inputs, task: str, *, layers: Layers | None = None) -> dict[str, torch.Tensor]:
    """G of every called layer, or of those of `layers`, on a task's inputs under the encoder's current weights."""
    sums: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}
    batch: dict[str, torch.Tensor] = {}
    weights = inputs.targets[task].weights

    def record(name: str, values: torch.Tensor) -> None:
        if values.ndim > 2 and len(values) % len(weights):
            return  # a table, such as DeBERTa's of relative positions: its rows belong to no input
        rows, row_weights = _rows(values, weights, batch.get("attention_mask"))
        product = rows.T @ (rows * row_weights)
        counts[name] = counts.get(name, 0) + len(rows)
        sums[name] = sums[name].add_(product) if name in sums else product

    with watching(linear_layers(setting.encoder.module) if layers is None else layers, record):
        for targets, batch in inputs.batches(task, _SIZE):
            weights = targets.weights
            setting.encoder.features(batch)  # in float32 always: least squares depend on small eigenvalues
    for name, total in sums.items():
        total.div_(max(counts[name], 1))
        if not torch.isfinite(total).all():
            raise NumericalError(
                f"the input of layer {name!r} is not finite on task {task!r}; check the weights of the experts"
            )
    return sums


def _rows(values: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows [r, k] of a layer's input without padding, and the weight [r, 1] of each row's input, or 1."""
    if mask is not None and values.shape[:-1] == mask.shape:
        real = mask != 0
        return values[real].double(), weights[:, None].expand(mask.shape)[real][:, None].double()
    rows = values.reshape(-1, values.shape[-1]).double()
    row_weights = weights.new_ones(len(rows))
    if len(rows) % len(weights) == 0:
        row_weights = weights.repeat_interleave(len(rows) // len(weights))
    return rows, row_weights[:, None].double()


def least_squares(total: torch.Tensor, moments: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Solve total X = moments for X [k, m]; also return the condition number: if infinite, X has the least norm."""
    factor, failed = torch.linalg.cholesky_ex(total)
    if not int(failed):
        condition = float(torch.linalg.norm(total, 1) * torch.linalg.norm(torch.cholesky_inverse(factor), 1))
        if condition < 1 / _SINGULAR:
            return torch.cholesky_solve(moments, factor), condition
    values, vectors = torch.linalg.eigh(total)
    kept = values > _SINGULAR * values[-1]
    vectors = vectors[:, kept]
    return vectors @ ((vectors.T @ moments) / values[kept, None]), float("inf")
