"""`vision8`: eight real image tasks with 10 to 345 classes on a small ViT (32 x 32, patch 4, 192 wide, 6 layers).

Arrays are read from a data folder (`NAME.npz`, or `vision/NAME.npz`). No pre-trained ViT of that size exists, so the
base is trained first: on all training sets together, its heads thrown away. The test sets play no part in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from orthomerge.data.reading import read_task
from orthomerge.models.processing import PixelProcessor
from orthomerge.suites.building import data_file, experts_root, make_both, make_experts, pretrained_vit
from orthomerge.suites.suite import Suite
from orthomerge.suites.table import SUITES
from orthomerge.tuning.settings import Mode, Tuning

if TYPE_CHECKING:
    from orthomerge.data.task import Task
    from orthomerge.suites.suite import Say


PROCESSOR = PixelProcessor(size=32, channels=3)
TUNING = Tuning(epochs=15, batch=128, lr=3e-4, head_lr=2e-3, weight_decay=0.05, augment="shift", precision="bfloat16")
PRETRAINING = replace(TUNING, epochs=30, batch=256, lr=8e-4, head_lr=8e-4)
JOINT = replace(TUNING, epochs=8, batch=256)
PRETRAINED_ON = SUITES["vision8"].tasks
SHAPE = {
    "hidden_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "intermediate_size": 768,
    "image_size": 32,
    "patch_size": 4,
}


def build(*, folder: Path, data: Path | None, base: str | None, device: str, say: Say) -> Suite:
    """Make or find the suite; meant for a GPU."""
    tasks = read_tasks(data)
    pretraining = replace(PRETRAINING, device=device)
    known = {name: tasks[name] for name in PRETRAINED_ON}
    pretrained_vit(known, folder=folder, shape=SHAPE, settings=pretraining, processor=PROCESSOR, say=say)
    settings, joint = (replace(given, device=device) for given in (TUNING, JOINT))
    experts, mtl = make_both(tasks, folder=folder, settings=settings, joint=joint, processor=PROCESSOR, say=say)
    return Suite("vision8", folder, tasks, PROCESSOR, experts, mtl)


def read_tasks(data: Path | None) -> dict[str, Task]:
    """The eight tasks from a data folder."""
    return {
        name: read_task(data_file(data, f"{name}.npz", f"vision/{name}.npz"), name=name)
        for name in SUITES["vision8"].tasks
    }


def experts_of(
    mode: Mode, *, folder: Path, tasks: Mapping[str, Task], device: str, say: Say, seed: int = 0
) -> dict[str, Path]:
    """Experts fine-tuned in one of the ways."""
    return make_experts(
        tasks,
        base=folder / "base",
        root=experts_root(folder, mode, seed),
        settings=replace(TUNING, mode=mode, seed=seed, device=device),
        processor=PROCESSOR,
        say=say,
    )
