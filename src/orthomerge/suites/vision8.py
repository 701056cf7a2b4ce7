"""`vision8`: eight real image tasks with 10 to 345 classes on a small ViT (32 x 32, patch 4, 192 wide, 6 layers).

Arrays are read from a data folder (`NAME.npz`, or `vision/NAME.npz`). No pre-trained ViT of that size exists, so the
base is trained first: on all training sets together, its heads thrown away. The test sets play no part in it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from orthomerge.models.processing import PixelProcessor
from orthomerge.suites.building import make_both, pretrained_vit, read_tasks
from orthomerge.suites.suite import Say, Suite
from orthomerge.suites.table import SUITES
from orthomerge.tuning.settings import Tuning

PROCESSOR = PixelProcessor(size=32, channels=3)
TUNING = Tuning(epochs=15, batch=128, lr=3e-4, head_lr=2e-3, weight_decay=0.05, augment="shift", precision="bfloat16")
PRETRAINING = replace(TUNING, epochs=30, batch=256, lr=8e-4, head_lr=8e-4)
JOINT = replace(TUNING, epochs=8, batch=256)
SHAPE = {
    "hidden_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "intermediate_size": 768,
    "image_size": 32,
    "patch_size": 4,
}


def build(*, name: str, folder: Path, data: Path | None, base: str | None, device: str, say: Say) -> Suite:
    """Make or find the suite; meant for a GPU."""
    tasks = read_tasks(SUITES[name].tasks, data, kind="vision", ends=(".npz",))
    pretraining, settings, joint = (replace(tuning, device=device) for tuning in (PRETRAINING, TUNING, JOINT))
    pretrained_vit(tasks, folder=folder, shape=SHAPE, settings=pretraining, processor=PROCESSOR, say=say)
    experts, mtl = make_both(tasks, folder=folder, settings=settings, joint=joint, processor=PROCESSOR, say=say)
    return Suite(name, folder, tasks, PROCESSOR, experts, mtl)
