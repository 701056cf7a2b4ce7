"""What building any suite comes down to: experts that are not there yet are fine-tuned, and all are found again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import CheckpointError
from orthomerge.files.ownership import EXPERT, SUITE, write_marker
from orthomerge.files.publish import publish
from orthomerge.files.removal import remove_empty, remove_tree
from orthomerge.models.load import quiet
from orthomerge.suites.training import Training, train_missing

if TYPE_CHECKING:
    from orthomerge.data.task import Task
    from orthomerge.models.processing import Processor
    from orthomerge.suites.suite import Say
    from orthomerge.tuning.settings import Mode, Tuning


def make_experts(
    tasks: Mapping[str, Task],
    *,
    base: Path,
    root: Path,
    settings: Tuning,
    processor: Processor,
    say: Say,
) -> dict[str, Path]:
    """One expert a task in `root`; those that are there already are kept."""
    trainings = _experts(tasks, base=base, root=root, settings=settings, processor=processor)
    train_missing(trainings, say=say)
    return {name: root / name for name in tasks}


def make_jointly(
    tasks: Mapping[str, Task], *, base: Path, root: Path, settings: Tuning, processor: Processor, say: Say
) -> dict[str, Path]:
    """One encoder for all tasks, with a head each."""
    train_missing([Training(tasks, base, root, settings, processor, jointly=True)], say=say)
    return {name: root / name for name in tasks}


def make_both(
    tasks: Mapping[str, Task],
    *,
    folder: Path,
    settings: Tuning,
    joint: Tuning,
    processor: Processor,
    say: Say,
) -> tuple[dict[str, Path], dict[str, Path]]:
    """Ordinary experts in FOLDER/experts and the joint model in FOLDER/mtl."""
    base, experts, mtl = (folder / name for name in ("base", "experts", "mtl"))
    trainings = _experts(tasks, base=base, root=experts, settings=settings, processor=processor)
    together = Training(tasks, base, mtl, joint, processor, jointly=True)
    train_missing([*trainings, together], say=say)
    return {name: experts / name for name in tasks}, {name: mtl / name for name in tasks}


def experts_root(folder: Path, mode: Mode, seed: int) -> Path:
    """Where the experts of a mode and seed lie: FOLDER/experts[-MODE][-SEED], those of the usual mode without it."""
    parts = ("experts", *([] if mode == "full" else [mode]), *([] if seed == 0 else [str(seed)]))
    return folder / "-".join(parts)


def _experts(
    tasks: Mapping[str, Task], *, base: Path, root: Path, settings: Tuning, processor: Processor
) -> list[Training]:
    """One training a task; for `tau_jp` the other tasks' training inputs come along, unlabelled."""
    return [
        Training(
            {name: task},
            base,
            root,
            settings,
            processor,
            [other["train"].unlabelled() for key, other in tasks.items() if key != name and settings.mode == "tau_jp"],
        )
        for name, task in tasks.items()
    ]


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
    if (folder / "base" / "config.json").is_file():
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
    remove_tree(start, proof=SUITE)
    for expert in trained.values():
        remove_tree(expert, proof=EXPERT)
    remove_empty(joint)


def data_file(data: Path | None, *candidates: str) -> Path:
    """The first of some files that is in the data folder."""
    if data is None:
        raise CheckpointError(
            f"this suite reads its tasks from a folder; give it with --data (wanted: {candidates[0]})"
        )
    found = next((data / name for name in candidates if (data / name).is_file()), None)
    if found is None:
        raise CheckpointError(f"{data} has no {' or '.join(candidates)}; give the folder that holds the suite's data")
    return found
