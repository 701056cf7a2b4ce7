"""Build a suite: a base of its own where none exists, and the experts that are not in its folder yet."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import CheckpointError
from orthomerge.data.reading import read_task
from orthomerge.files.folders import EXPERT, SUITE, write_marker
from orthomerge.files.opening import open_checkpoint
from orthomerge.files.publish import publish
from orthomerge.files.replacing import remove_empty, remove_folder
from orthomerge.models.processors import COMPANIONS
from orthomerge.models.skeleton import quiet
from orthomerge.suites.suite import Say, Suite
from orthomerge.tuning.finetune import finetune, finetune_jointly

if TYPE_CHECKING:
    from orthomerge.data.task import Task
    from orthomerge.tuning.settings import Tuning


def make_experts(suite: Suite, settings: Tuning, *, root: Path, say: Say) -> dict[str, Path]:
    """One expert per task in `root`; those that are there already are kept.

    For `tau_jp` the other tasks' training inputs are passed too, unlabelled.
    """
    for name, task in suite.tasks.items():
        if _is_there(root / name):
            continue
        others = [other["train"].unlabelled() for key, other in suite.tasks.items() if key != name]
        metrics = finetune(
            task,
            base=suite.base,
            out=root / name,
            settings=settings,
            processor=suite.processor,
            others=others if settings.mode == "tau_jp" else (),
            resume=False,  # a training takes minutes at most
        )
        say(f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in metrics.items()))
    return {name: root / name for name in suite.tasks}


def more_experts(suite: Suite, settings: Tuning, *, say: Say) -> dict[str, Path]:
    """Experts of a suite fine-tuned in any mode and with any seed: in FOLDER/experts[-MODE][-SEED]."""
    mode, seed = "" if settings.mode == "full" else f"-{settings.mode}", f"-{settings.seed}" if settings.seed else ""
    return make_experts(suite, settings, root=suite.folder / f"experts{mode}{seed}", say=say)


def make_jointly(suite: Suite, settings: Tuning, *, base: Path, root: Path, say: Say) -> dict[str, Path]:
    """One encoder for all tasks, with a head per task."""
    if not all(_is_there(root / name) for name in suite.tasks):
        options: dict[str, Any] = {"settings": settings, "processor": suite.processor, "force": True, "resume": False}
        finetune_jointly(suite.tasks, base=base, out_root=root, **options)
        say("trained on all tasks together")
    return {name: root / name for name in suite.tasks}


def with_models(suite: Suite, settings: Tuning, joint: Tuning, *, say: Say) -> Suite:
    """The suite with experts in FOLDER/experts and the joint model in FOLDER/mtl."""
    paths = make_experts(suite, settings, root=suite.folder / "experts", say=say)
    mtl = make_jointly(suite, joint, base=suite.base, root=suite.folder / "mtl", say=say)
    return replace(suite, paths=paths, mtl=mtl)


def copy_base(target: Path, reference: str, say: Say) -> None:
    """The base in the suite's own folder: weights, config, tokenizer, image processor."""
    if _is_there(target):
        return
    say(f"base: {reference}")
    source = open_checkpoint(reference)
    if source.config is None:
        raise CheckpointError(f"the base {reference} must be a folder with weights and a config.json")
    index = "model.safetensors" if source.files[0].path.suffix == ".safetensors" else "pytorch_model.bin"
    names = (*(file.path.name for file in source.files), f"{index}.index.json", "config.json", *COMPANIONS)
    with publish(target, force=True, need=source.nbytes, inputs=[source.path], marker=SUITE) as partial:
        for name in names:
            if (source.path / name).is_file():
                shutil.copyfile(source.path / name, partial / name)
        write_marker(partial, SUITE)


def pretrained_vit(suite: Suite, shape: Mapping[str, Any], settings: Tuning, *, say: Say) -> None:
    """A base of our own in FOLDER/base: a ViT trained on all training sets together, without its heads."""
    if _is_there(suite.base):
        return
    start, joint = suite.folder / "start", suite.folder / "pretraining"
    with quiet():
        import torch
        from transformers import ViTConfig, ViTModel

        config = ViTConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **shape)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = ViTModel(config, add_pooling_layer=False)
    _save(model, start)
    say("pre-training the base on all tasks together")
    trained = make_jointly(suite, settings, base=start, root=joint, say=say)
    with quiet():
        model = ViTModel.from_pretrained(next(iter(trained.values())), add_pooling_layer=False)
    _save(model, suite.base)
    remove_folder(start, proof=SUITE)
    for expert in trained.values():
        remove_folder(expert, proof=EXPERT)
    remove_empty(joint)


def _save(model: Any, folder: Path) -> None:
    with quiet(), publish(folder, force=True, marker=SUITE) as partial:
        model.save_pretrained(partial)
        write_marker(partial, SUITE)


def read_tasks(names: Sequence[str], data: Path | None, *, kind: str, ends: Sequence[str]) -> dict[str, Task]:
    """Tasks from a data folder: files of their names, with one of some ends, in the folder or its subfolder `kind`."""
    if data is None:
        raise CheckpointError(
            f"this suite reads its tasks from a folder; give it with --data (wanted: {names[0]}{ends[0]})"
        )
    tasks = {}
    for name in names:
        files = [f"{place}{name}{end}" for end in ends for place in ("", f"{kind}/")]
        path = next((data / file for file in files if (data / file).is_file()), None)
        if path is None:
            raise CheckpointError(f"{data} has no {' or '.join(files)}; give the folder that holds the suite's data")
        tasks[name] = read_task(path, name=name, keep_empty=True)
    return tasks


def _is_there(folder: Path) -> bool:
    return (folder / "config.json").is_file()
