"""A suite: base, experts and tasks under one name, built once in one folder and then reused.

FOLDER/base/            the pre-trained encoder
FOLDER/experts/TASK/    fine-tuned classifiers, in the format of transformers
FOLDER/mtl/TASK/        one encoder trained on all tasks at once, with each task's head
FOLDER/features/        cache of encoded features
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from orthomerge.core.errors import CheckpointError
from orthomerge.data.task import Task
from orthomerge.evaluation.evaluate import Subject, references_of
from orthomerge.files.folders import EXPERT, SUITE, write_marker
from orthomerge.files.opening import open_checkpoint
from orthomerge.files.publish import publish
from orthomerge.files.replacing import remove_empty, remove_folder
from orthomerge.merging.merge import merge_opened
from orthomerge.models.encoding import Encoding
from orthomerge.models.experts import Experts
from orthomerge.models.features import FeatureCache
from orthomerge.models.model import Model
from orthomerge.models.opening import Expert, opening_of
from orthomerge.models.processing import Processor
from orthomerge.models.processors import COMPANIONS
from orthomerge.models.skeleton import quiet
from orthomerge.tuning.finetune import finetune, finetune_jointly
from orthomerge.tuning.settings import Tuning

Say = Callable[[str], None]


@dataclass(frozen=True)
class Suite:
    """A built suite.

    `paths`: folders of the experts, or an `Expert` with head, labels or prefix for other files. `options`: options of
    `Opening` for all experts, for example `pooling`.
    """

    name: str
    folder: Path
    tasks: Mapping[str, Task]
    processor: Processor
    paths: Mapping[str, Path | Expert] = field(default_factory=dict)
    mtl: Mapping[str, Path] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def base(self) -> Path:
        return self.folder / "base"

    @cached_property
    def experts(self) -> Experts:
        return Experts(opening_of(self.paths, base=self.base, **self.options)[0]).check()

    def merged(self, method: str, options: Mapping[str, Any] | None = None) -> Model:
        return merge_opened(self.experts, method, options or {})

    def references(self) -> dict[str, Subject]:
        """Return references for tables: the base with the experts' heads, the experts, and multi-task training."""
        references = references_of(self.experts, self.tasks)
        if self.mtl:
            references["mtl"] = Subject("mtl", Experts(opening_of(self.mtl, **self.options)[0]).check().sources)
        return references

    def encoding(self, device: str = "auto", *, batch: int = 64) -> Encoding:
        return Encoding(FeatureCache(self.folder / "features"), device, batch=batch, processor=self.processor)


def make_experts(suite: Suite, settings: Tuning, *, root: Path, say: Say) -> dict[str, Path]:
    """Fine-tune one expert per task in `root`, except those that exist."""
    for name, task in suite.tasks.items():
        if _exists(root / name):
            continue
        others = [other["train"].unlabelled() for key, other in suite.tasks.items() if key != name]
        metrics = finetune(
            task,
            base=suite.base,
            out=root / name,
            settings=settings,
            processor=suite.processor,
            others=others if settings.mode == "tau_jp" else (),
            resume=False,  # training takes minutes at most
        )
        say(f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in metrics.items()))
    return {name: root / name for name in suite.tasks}


def more_experts(suite: Suite, settings: Tuning, *, say: Say) -> dict[str, Path]:
    """Fine-tune experts in any mode and with any seed, in FOLDER/experts[-MODE][-SEED]."""
    mode, seed = "" if settings.mode == "full" else f"-{settings.mode}", f"-{settings.seed}" if settings.seed else ""
    return make_experts(suite, settings, root=suite.folder / f"experts{mode}{seed}", say=say)


def with_models(suite: Suite, settings: Tuning, joint: Tuning, *, say: Say) -> Suite:
    """Add experts in FOLDER/experts and the joint model in FOLDER/mtl."""
    return replace(
        suite,
        paths=more_experts(suite, settings, say=say),
        mtl=_make_jointly(suite, joint, base=suite.base, root=suite.folder / "mtl", say=say),
    )


def copy_base(target: Path, reference: str, say: Say) -> None:
    """Copy weights, config, tokenizer and image processor of the base, unless `target` exists."""
    if _exists(target):
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
    """Train a ViT on all training sets together and save it without heads as the base, unless that exists."""
    if _exists(suite.base):
        return
    start, joint = suite.folder / "start", suite.folder / "pretraining"
    with quiet():
        from transformers import ViTConfig, ViTModel

        config = ViTConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **shape)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = ViTModel(config, add_pooling_layer=False)
    _save(model, start)
    say("pre-training the base on all tasks together")
    trained = _make_jointly(suite, settings, base=start, root=joint, say=say)
    with quiet():
        model = ViTModel.from_pretrained(next(iter(trained.values())), add_pooling_layer=False)
    _save(model, suite.base)
    remove_folder(start, proof=SUITE)
    for expert in trained.values():
        remove_folder(expert, proof=EXPERT)
    remove_empty(joint)


def _make_jointly(suite: Suite, settings: Tuning, *, base: Path, root: Path, say: Say) -> dict[str, Path]:
    """Train one encoder for all tasks, with a head per task, unless it exists."""
    if not all(_exists(root / name) for name in suite.tasks):
        options: dict[str, Any] = {"settings": settings, "processor": suite.processor, "force": True, "resume": False}
        finetune_jointly(suite.tasks, base=base, out_root=root, **options)
        say("trained on all tasks together")
    return {name: root / name for name in suite.tasks}


def _save(model: Any, folder: Path) -> None:
    with quiet(), publish(folder, force=True, marker=SUITE) as partial:
        model.save_pretrained(partial)
        write_marker(partial, SUITE)


def _exists(folder: Path) -> bool:
    return (folder / "config.json").is_file()
