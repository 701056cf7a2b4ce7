"""Build a suite: a base of its own where none exists, and the experts that are not in its folder yet."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import CheckpointError
from orthomerge.data.reading import read_task
from orthomerge.files.opening import open_checkpoint
from orthomerge.files.ownership import EXPERT, SUITE, write_marker
from orthomerge.files.publish import publish
from orthomerge.files.removal import remove_empty, remove_folder
from orthomerge.models.load import quiet
from orthomerge.models.processors import COMPANIONS
from orthomerge.suites.suite import Say, Suite
from orthomerge.tuning.finetune import finetune, finetune_jointly

if TYPE_CHECKING:
    from orthomerge.data.task import Task
    from orthomerge.models.processing import Processor
    from orthomerge.tuning.settings import Mode, Tuning


def make_experts(
    tasks: Mapping[str, Task], *, base: Path, root: Path, settings: Tuning, processor: Processor, say: Say
) -> dict[str, Path]:
    """One expert per task in `root`; those that are there already are kept.

    For `tau_jp` the other tasks' training inputs come along, unlabelled.
    """
    for name, task in tasks.items():
        if _is_there(root / name):
            continue
        others = [other["train"].unlabelled() for key, other in tasks.items() if key != name]
        metrics = finetune(
            task,
            base=base,
            out=root / name,
            settings=settings,
            processor=processor,
            others=others if settings.mode == "tau_jp" else (),
            resume=False,  # a training takes minutes at most
        )
        say(f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in metrics.items()))
    return {name: root / name for name in tasks}


def make_jointly(
    tasks: Mapping[str, Task], *, base: Path, root: Path, settings: Tuning, processor: Processor, say: Say
) -> dict[str, Path]:
    """One encoder for all tasks, with a head each."""
    if not all(_is_there(root / name) for name in tasks):
        finetune_jointly(
            tasks, base=base, out_root=root, settings=settings, processor=processor, force=True, resume=False
        )
        say("trained on all tasks together")
    return {name: root / name for name in tasks}


def make_both(
    tasks: Mapping[str, Task], *, folder: Path, settings: Tuning, joint: Tuning, processor: Processor, say: Say
) -> tuple[dict[str, Path], dict[str, Path]]:
    """Ordinary experts in FOLDER/experts and the joint model in FOLDER/mtl."""
    base, experts, mtl = (folder / name for name in ("base", "experts", "mtl"))
    return (
        make_experts(tasks, base=base, root=experts, settings=settings, processor=processor, say=say),
        make_jointly(tasks, base=base, root=mtl, settings=joint, processor=processor, say=say),
    )


def more_experts(suite: Suite, settings: Tuning, *, say: Say) -> dict[str, Path]:
    """Experts of a suite fine-tuned in some other way or with another seed, beside the ordinary ones."""
    return make_experts(
        suite.tasks,
        base=suite.base,
        root=experts_root(suite.folder, settings.mode, settings.seed),
        settings=settings,
        processor=suite.processor,
        say=say,
    )


def experts_root(folder: Path, mode: Mode, seed: int) -> Path:
    """Where the experts of a mode and seed lie: FOLDER/experts[-MODE][-SEED], those of the usual mode without it."""
    parts = ("experts", *([] if mode == "full" else [mode]), *([] if seed == 0 else [str(seed)]))
    return folder / "-".join(parts)


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


def pretrained_vit(
    tasks: Mapping[str, Task],
    *,
    folder: Path,
    shape: Mapping[str, Any],
    settings: Tuning,
    processor: Processor,
    say: Say,
) -> None:
    """A base of our own in FOLDER/base: a ViT trained on all training sets together, its heads thrown away."""
    if _is_there(folder / "base"):
        return
    start, joint = folder / "start", folder / "pretraining"
    with quiet():
        import torch
        from transformers import ViTConfig, ViTModel

        config = ViTConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **shape)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = ViTModel(config, add_pooling_layer=False)
        with publish(start, force=True, marker=SUITE) as partial:
            model.save_pretrained(partial)
            write_marker(partial, SUITE)
    say("pre-training the base on all tasks together")
    trained = make_jointly(tasks, base=start, root=joint, settings=settings, processor=processor, say=say)
    with quiet(), publish(folder / "base", force=True, marker=SUITE) as partial:
        encoder = ViTModel.from_pretrained(next(iter(trained.values())), add_pooling_layer=False)
        encoder.save_pretrained(partial)
        write_marker(partial, SUITE)
    remove_folder(start, proof=SUITE)
    for expert in trained.values():
        remove_folder(expert, proof=EXPERT)
    remove_empty(joint)


def read_tasks(names: Sequence[str], data: Path | None, *, kind: str, ends: Sequence[str]) -> dict[str, Task]:
    """Tasks from a data folder: files of their names, with one of some ends, in the folder or its subfolder `kind`."""
    tasks = {}
    for name in names:
        candidates = [f"{place}{name}{end}" for end in ends for place in ("", f"{kind}/")]
        if data is None:
            raise CheckpointError(
                f"this suite reads its tasks from a folder; give it with --data (wanted: {candidates[0]})"
            )
        path = next((data / candidate for candidate in candidates if (data / candidate).is_file()), None)
        if path is None:
            raise CheckpointError(
                f"{data} has no {' or '.join(candidates)}; give the folder that holds the suite's data"
            )
        tasks[name] = read_task(path, name=name, keep_empty=True)
    return tasks


def _is_there(folder: Path) -> bool:
    return (folder / "config.json").is_file()
