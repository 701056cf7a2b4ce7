"""`digits`: the embedded suite. Seven tasks, a ViT 64 wide and 4 deep, everything trained on a CPU in minutes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from orthomerge.models.processing import PixelProcessor
from orthomerge.suites.building import experts_root, make_both, make_experts, pretrained_vit
from orthomerge.suites.digit_tasks import digit_tasks
from orthomerge.suites.suite import Suite
from orthomerge.tuning.settings import Mode, Tuning

if TYPE_CHECKING:
    from orthomerge.data.task import Task
    from orthomerge.suites.suite import Say


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


def build(*, folder: Path, data: Path | None, base: str | None, device: str, say: Say) -> Suite:
    """Make or find the suite; `data`, `base` and `device` do not matter: it is small and self-contained."""
    tasks = digit_tasks()
    pretrained_vit(tasks, folder=folder, shape=_SHAPE, settings=_PRETRAINING, processor=PROCESSOR, say=say)
    experts, mtl = make_both(tasks, folder=folder, settings=TUNING, joint=_JOINT, processor=PROCESSOR, say=say)
    return Suite("digits", folder, tasks, PROCESSOR, experts, mtl)


def experts_of(mode: Mode, *, folder: Path, tasks: Mapping[str, Task], say: Say, seed: int = 0) -> dict[str, Path]:
    """Experts fine-tuned in some other way or with another seed, beside the ordinary ones."""
    return make_experts(
        tasks,
        base=folder / "base",
        root=experts_root(folder, mode, seed),
        settings=replace(TUNING, mode=mode, seed=seed),
        processor=PROCESSOR,
        say=say,
    )
