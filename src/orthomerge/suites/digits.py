"""`digits`: seven tasks with different label sets, made from scikit-learn's 1,797 digits of 8 x 8 pixels.

A ViT of width 64 and 4 layers, trained on a CPU in minutes. All tasks use the same split of the same images, so no test
image of one task is a training image of another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from orthomerge.core.errors import RecipeError
from orthomerge.data.task import Examples, Split, Task
from orthomerge.models.processing import PixelProcessor
from orthomerge.suites.suite import Say, Suite, pretrained_vit, with_models
from orthomerge.tuning.settings import Tuning

PROCESSOR = PixelProcessor(size=8, channels=1)
TUNING = Tuning(epochs=16, batch=64, lr=6e-4, head_lr=1e-2, device="cpu")
_SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 8,
    "patch_size": 2,
    "num_channels": 1,
}
_PRETRAINING = replace(TUNING, epochs=6, lr=1e-3, head_lr=1e-3)
_JOINT = replace(TUNING, epochs=8)

Images = np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]
Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]
# Makes images and labels of a task from images and digits; the generator draws how each image is changed.
Make = Callable[[Images, Numbers, np.random.Generator], tuple[Images, Numbers]]

_DIGITS = tuple(str(digit) for digit in range(10))
_SHIFTS = ((0, 0), (0, -2), (0, 2), (-2, 0), (2, 0))  # rows, columns
_SHARES: dict[Split, float] = {"train": 0.65, "val": 0.1}  # the rest is test


def build(*, name: str, folder: Path, data: Path | None, base: str | None, device: str, say: Say) -> Suite:
    """Build `digits`; `data`, `base` and `device` are ignored."""
    suite = Suite(name, folder, digit_tasks(), PROCESSOR)
    pretrained_vit(suite, _SHAPE, _PRETRAINING, say=say)
    return with_models(suite, TUNING, _JOINT, say=say)


def digit_tasks() -> dict[str, Task]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise RecipeError("the digits suite needs scikit-learn: pip install 'orthomerge[suites]'") from error
    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)
    digits = bunch.target.astype(np.int64)
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(images))
    ends = np.cumsum([round(share * len(images)) for share in _SHARES.values()])
    names: tuple[Split, ...] = (*_SHARES, "test")
    indices = dict(zip(names, np.split(order, ends), strict=True))
    tasks: dict[str, Task] = {}
    for number, (name, (labels, make)) in enumerate(_TASKS.items()):
        inputs, targets = make(images, digits, np.random.Generator(np.random.PCG64([number, 7])))
        splits: dict[str, Examples] = {
            split: Examples(list(inputs[rows]), targets[rows], split) for split, rows in indices.items()
        }
        tasks[name] = Task(name, labels, "image", splits)
    return tasks


def _rotation(images: Images, digits: Numbers, generator: np.random.Generator) -> tuple[Images, Numbers]:
    turns = generator.integers(0, 4, len(images))
    return np.stack([np.rot90(image, turn) for image, turn in zip(images, turns, strict=True)]), turns


def _mirrored(images: Images, digits: Numbers, generator: np.random.Generator) -> tuple[Images, Numbers]:
    mirrored = generator.integers(0, 2, len(images))
    return np.where(mirrored[:, None, None] == 1, images[:, :, ::-1], images), mirrored


def _shift(images: Images, digits: Numbers, generator: np.random.Generator) -> tuple[Images, Numbers]:
    shifts = generator.integers(0, len(_SHIFTS), len(images))
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    corners = [(2 - _SHIFTS[shift][0], 2 - _SHIFTS[shift][1]) for shift in shifts]
    moved = [image[row : row + 8, column : column + 8] for image, (row, column) in zip(padded, corners, strict=True)]
    return np.stack(moved), shifts


_TASKS: dict[str, tuple[tuple[str, ...], Make]] = {
    "digit": (_DIGITS, lambda images, digits, _: (images, digits)),
    "parity": (("even", "odd"), lambda images, digits, _: (images, digits % 2)),
    "size": (("0-2", "3-5", "6-9"), lambda images, digits, _: (images, np.searchsorted([3, 6], digits, side="right"))),
    "rotation": (("0", "90", "180", "270"), _rotation),
    "mirrored": (("as written", "mirrored"), _mirrored),
    "negative": (_DIGITS, lambda images, digits, _: (255 - images, digits)),
    "shift": (("none", "left", "right", "up", "down"), _shift),
}
