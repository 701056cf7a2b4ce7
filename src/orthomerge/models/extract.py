"""Features of every input in one pass: none left out, none out of place, nothing of the encoder changed.

No thread prepares inputs: it would compete with this one for Python's lock (on an H200: 6,600 texts per second through
a BERT of six layers, where the model alone did 20,800 and the tokenizer 19,000).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from orthomerge.core.device import device_of
from orthomerge.core.errors import IncompatibleError, NumericalError, OrthomergeError, RecipeError, nearest
from orthomerge.models.features import Features, Precision
from orthomerge.models.processing import batches

if TYPE_CHECKING:
    import torch

    from orthomerge.data.task import Examples
    from orthomerge.models.family import Family
    from orthomerge.models.processing import Processor

    Batch = Mapping[str, torch.Tensor]


def extract(
    encoder: torch.nn.Module | Callable[..., Any],
    family: Family,
    pooling: str,
    examples: Examples,
    processor: Processor,
    *,
    task: str,
    batch: int = 64,
    device: str = "auto",
    autocast: Precision = "float32",
) -> Features:
    """Features of all examples in their order, in float32 on the CPU, with their labels.

    A module is run in eval mode and put back into its own; it is moved to the device and stays there. A function of
    parameters must have them on the device itself. Texts of similar length share a batch, for less padding.
    """
    import torch

    _check_options(family, pooling, examples, task=task, batch=batch, autocast=autocast)
    place = device_of(device)
    values: torch.Tensor | None = None
    filled = 0
    # Autocast around the whole pass, so that weights are cast once and not for each batch.
    with _autocast(place, autocast), _evaluating(encoder, place):
        for rows, inputs in _prepared(examples, processor, batch):
            features = _forward(encoder, family, pooling, inputs, task=task, device=place, autocast=autocast)
            width = "d" if values is None else values.shape[1]
            if features.ndim != 2 or len(features) != len(rows) or width not in ("d", features.shape[1]):
                raise IncompatibleError(
                    f"the encoder must give features ({len(rows)}, {width}) for {len(rows)} inputs of "
                    f"{task!r}, got {tuple(features.shape)}; choose another pooling, or correct the encoder"
                )
            if values is None:
                values = torch.empty(len(examples), features.shape[1], dtype=torch.float32)
            part = features.to("cpu", torch.float32)
            _check_finite(part, rows, task=task, autocast=autocast)
            values.index_copy_(0, rows, part)
            filled += len(rows)
    if values is None or filled != len(examples):
        raise AssertionError(f"{filled} of {len(examples)} examples of {task!r} were encoded")
    return Features.of(values, examples, task)


def _check_options(
    family: Family, pooling: str, examples: Examples, *, task: str, batch: int, autocast: Precision
) -> None:
    if pooling not in family.poolings:
        raise RecipeError(f"family {family.name!r} has no pooling {pooling!r}; {nearest(pooling, family.poolings)}")
    if autocast not in get_args(Precision):
        raise RecipeError(f"unknown precision {autocast!r}; {nearest(autocast, get_args(Precision))}")
    if batch < 1:
        raise RecipeError(f"'batch' must be at least 1, got {batch}")
    if not len(examples):
        raise RecipeError(f"the {examples.split} split of {task!r} is empty; there is nothing to encode")


def _prepared(examples: Examples, processor: Processor, size: int) -> Iterator[tuple[torch.Tensor, Batch]]:
    """Rows [B] and the inputs at them, batch by batch."""
    import torch

    order = _order(examples, processor)
    processed = batches(examples, processor, size, order=order)
    for rows in torch.split(torch.tensor(order), size):
        with torch.autocast("cpu", enabled=False):  # it is for the encoder, not for resizing images
            inputs = next(processed)
        yield rows, inputs


def _order(examples: Examples, processor: Processor) -> list[int]:
    """Longest texts first, so that what does not fit into memory fails at once; images as they come."""
    if processor.modality != "text":
        return list(range(len(examples)))
    lengths = np.fromiter(map(len, examples.inputs), np.int64, len(examples))
    order: list[int] = np.argsort(-lengths, kind="stable").tolist()
    return order


def _forward(
    encoder: torch.nn.Module | Callable[..., Any],
    family: Family,
    pooling: str,
    inputs: Batch,
    *,
    task: str,
    device: torch.device,
    autocast: Precision,
) -> torch.Tensor:
    """The features of one batch, on the device."""
    import torch

    if "input_ids" in inputs and "attention_mask" not in inputs:
        raise RecipeError(
            f"a batch of {task!r} has 'input_ids' without 'attention_mask', so padding would count as text; let the "
            "tokenizer return the mask"
        )
    # In inference mode autocast would cast the weights anew for each batch.
    mode = torch.inference_mode if autocast == "float32" else torch.no_grad
    try:
        with mode(), _autocast(device, autocast):
            return family.features(encoder, {name: tensor.to(device) for name, tensor in inputs.items()}, pooling)
    except torch.OutOfMemoryError as error:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in inputs.items())
        raise OrthomergeError(
            f"{device} ran out of memory on inputs of {task!r} ({shapes}); give a smaller batch"
        ) from error


def _check_finite(values: torch.Tensor, rows: torch.Tensor, *, task: str, autocast: Precision) -> None:
    # A sum is finite only if all its terms are: one cheap pass, and a closer look where it is not.
    finite = None if math.isfinite(float(values.sum())) else values.isfinite().all(1)
    if finite is not None and not finite.all():
        row = int(rows[~finite].min())
        cure = "check its weights" if autocast == "float32" else f"{autocast} may be too narrow for it"
        raise NumericalError(f"the encoder gives features that are not finite for row {row} of {task!r}; {cure}")


@contextmanager
def _evaluating(encoder: object, device: torch.device) -> Iterator[None]:
    """A module on the device and in eval mode; each part gets its own mode back."""
    import torch

    if not isinstance(encoder, torch.nn.Module):
        yield
        return
    modes = [(module, module.training) for module in encoder.modules()]
    encoder.to(device).eval()
    try:
        yield
    finally:
        torch.clear_autocast_cache()  # of weights cast without gradient, should the caller train on under autocast
        for module, training in modes:
            module.training = training


def _autocast(device: torch.device, precision: Precision) -> torch.autocast:
    import torch

    enabled = precision != "float32"
    return torch.autocast(device.type, dtype=getattr(torch, precision) if enabled else None, enabled=enabled)
