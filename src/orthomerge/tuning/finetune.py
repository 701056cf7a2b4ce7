"""Fine-tune a base on one task, or jointly on several with one encoder (multi-task learning)."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from orthomerge.core.device import derive
from orthomerge.core.errors import IncompatibleError, NumericalError, RecipeError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.core.version import VERSION
from orthomerge.data.task import Examples, Task
from orthomerge.files.folders import EXPERT
from orthomerge.files.opening import open_checkpoint
from orthomerge.files.publish import publish
from orthomerge.files.run_state import RunState, clear_state, state_folder
from orthomerge.models.family import Family
from orthomerge.models.heads import Head
from orthomerge.models.networks import LinearisedEncoder
from orthomerge.models.processing import Processor
from orthomerge.models.tensors import MemoryTensors, content_digest
from orthomerge.tuning.loop import Run, fit_head, train
from orthomerge.tuning.model import (
    Model,
    OrdinaryEncoder,
    add_adapter,
    choose_family,
    load_base,
    start_head,
    write_adapter,
    write_documents,
    write_weights,
)
from orthomerge.tuning.settings import LINEARISED, PROBED, Tuning

_JOINT = ("full", "head_first")


def finetune(
    task: Task,
    *,
    base: Path,
    out: Path,
    settings: Tuning,
    processor: Processor,
    others: Sequence[Examples] = (),
    head: Head | None = None,
    family: str | None = None,
    progress: Progress = SILENT,
    force: bool = False,
    resume: bool = True,
    inputs: Iterable[Path] = (),
) -> dict[str, float]:
    """Fine-tune `base` on a task's train split, write the expert to `out`, and return the metrics of the last epoch.

    `others`: inputs of other tasks, for `tau_jp`. `head`: the initial head, which `frozen_head`, and CLIP without a
    linear head, do not train. `resume`: save the state of every epoch beside `out`, so that a killed run can continue.
    `inputs`: files that `out` must not overlap. For experts to evaluate as linear models see `Model.linearised`.
    """
    training = _Training(
        task.name, [task], settings, processor, others, progress, base=base, head=head, family_name=family
    )
    state = state_folder(out, "tuning")
    return training.write({task.name: out}, state, force=force, resume=resume, inputs=inputs)[task.name]


def finetune_jointly(
    tasks: Mapping[str, Task],
    *,
    base: Path,
    out_root: Path,
    settings: Tuning,
    processor: Processor,
    family: str | None = None,
    progress: Progress = SILENT,
    force: bool = False,
    resume: bool = True,
) -> dict[str, dict[str, float]]:
    """Train one encoder on the batches of all tasks, and write it with each task's head to `out_root`/NAME."""
    if settings.mode not in _JOINT:
        raise RecipeError(f"joint training must have mode {' or '.join(_JOINT)}, got {settings.mode!r}")
    if not tasks:
        raise RecipeError("joint training needs at least one task, got none")
    for name in tasks:
        if Path(name).name != name:
            raise RecipeError(f"a task's name must be the name of a folder, got {name!r}; rename the task")
    named = [replace(task, name=name) for name, task in tasks.items()]
    training = _Training("joint", named, settings, processor, progress=progress, base=base, family_name=family)
    return training.write(
        {name: out_root / name for name in tasks}, state_folder(out_root, "tuning"), force=force, resume=resume
    )


@dataclass(frozen=True)
class _Training(Run):
    base: Path = field(kw_only=True)
    head: Head | None = None
    family_name: str | None = None

    def write(
        self, outs: Mapping[str, Path], state: Path, *, force: bool, resume: bool, inputs: Iterable[Path] = ()
    ) -> dict[str, dict[str, float]]:
        """Train, write a folder per task, and return the metrics of each."""
        family = self._check()
        checkpoint = open_checkpoint(self.base)
        need = sum(4 * checkpoint.spec(name).numel for name in checkpoint)  # one expert in float32
        paths = [self.base, *inputs]
        with ExitStack() as stack:
            folders = {
                name: stack.enter_context(publish(out, force=force, need=need, inputs=paths, marker=EXPERT))
                for name, out in outs.items()
            }
            metrics = self._train(family, folders, RunState(state, self._fingerprint(family)) if resume else None)
        clear_state(state)
        return metrics

    def _check(self) -> Family:
        mode = self.settings.mode
        for task in self.tasks:
            _check_labelled(task, "train")
            if "val" in task.splits:
                _check_labelled(task, "val")
        family = choose_family(self.base, self.family_name, head=self.head)
        if family.head is None and mode in _JOINT:
            raise RecipeError(
                f"family {family.name!r} has no head, which mode {mode!r} trains and saves; "
                "use frozen_head, lora, linearised or tau_jp"
            )
        wrong = next((task for task in self.tasks if task.modality != family.modality), None)
        if wrong is not None:
            raise IncompatibleError(
                f"task {wrong.name!r} has modality {wrong.modality!r}, but family {family.name!r} reads "
                f"{family.modality!r}; choose another base"
            )
        if mode == "frozen_head" and self.head is None:
            raise RecipeError("mode 'frozen_head' needs a head; give it as `head` (CLIP: zero_shot_head)")
        if mode == "tau_jp" and not any(len(part) for part in self.others):
            raise RecipeError("mode 'tau_jp' needs inputs of other tasks; give them as `others`")
        if self.settings.augment != "none" and family.modality != "image":
            raise RecipeError(
                f"'augment' must be none for a family that reads {family.modality!r}, got {self.settings.augment!r}: "
                "only images can be shifted; leave it out"
            )
        _ = self.device  # refuses an unknown one
        return family

    def _train(
        self, family: Family, folders: Mapping[str, Path], state: RunState | None
    ) -> dict[str, dict[str, float]]:
        device = self.device
        own = [] if device.type != "cuda" else [torch.cuda.current_device() if device.index is None else device.index]
        with torch.random.fork_rng(devices=own):
            torch.manual_seed(derive(self.settings.seed, "model"))
            model, names, adapted = self._model(family)
            saved = None if state is None else state.read()
            try:
                trains_heads = any(parameter.requires_grad for parameter in model.heads.parameters())
                if saved is None and self.settings.mode in PROBED and trains_heads:
                    for number in range(len(self.tasks)):
                        fit_head(model, self, number)
                metrics = train(model, self, state, saved)
            except NumericalError:
                if state is not None:
                    clear_state(state.folder)  # a run resumed from it would fail again
                raise
        model.to("cpu")
        for number, task in enumerate(self.tasks):
            notes = {
                "task": task.name,
                "family": family.name,
                "pooling": self._pooling(family),
                "mode": self.settings.mode if len(self.tasks) == 1 else "multitask",
                "val_accuracy": metrics[number].get("val_accuracy"),
                "tuning": asdict(self.settings),
            }
            folder = folders[task.name]
            if adapted is not None:
                write_adapter(folder, adapted, family)
            else:
                write_weights(folder, model.encoding.tuned(), names, model.head(number).head(task.labels), family)
            write_documents(folder, task.labels, family=family, base=self.base, notes=notes)
        return {task.name: {**own, "steps": self.steps} for task, own in zip(self.tasks, metrics, strict=True)}

    def _pooling(self, family: Family) -> str:
        return self.settings.pooling or family.default_pooling

    def _model(self, family: Family) -> tuple[Model, Mapping[str, str], Any]:
        """Return the model, its encoder's names (on disk -> in its state dict), and for `lora` the peft model."""
        settings, pooling = self.settings, self._pooling(family)
        skeleton = load_base(self.base, family, pooling)
        kind = LinearisedEncoder if settings.mode in LINEARISED else OrdinaryEncoder
        encoding = kind(family, pooling, skeleton.module).to(self.device)
        with torch.no_grad():
            batch, _ = self.train.batch(0, torch.tensor([0]))
            width = encoding.eval()(batch).shape[1]
        heads = []
        for number, task in enumerate(self.tasks):
            generator = torch.Generator().manual_seed(derive(settings.seed, "head", number))
            heads.append(start_head(self.head, family.head, task.labels, width=width, generator=generator))
        model = Model(encoding, heads)
        adapted = add_adapter(model, family, base=self.base, settings=settings) if settings.mode == "lora" else None
        if settings.mode == "frozen_head" or family.head is None:
            model.heads.requires_grad_(False)
        return model.to(self.device), skeleton.names, adapted

    def _fingerprint(self, family: Family) -> str:
        parts: dict[str, Any] = {
            "version": [VERSION, torch.__version__],
            "settings": asdict(self.settings),
            "family": family.name,
            "processor": self.processor.digest(),
            "base": [file.digest() for file in open_checkpoint(self.base).files],
            "tasks": [[task.name, task.labels, _digests(task)] for task in self.tasks],
            "others": [part.digest() for part in self.others],
            "head": None if self.head is None else content_digest(MemoryTensors(self.head.tensors()), ""),
        }
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _digests(task: Task) -> list[Any]:
    used = [task[name] for name in ("train", "val") if name in task.splits]
    return [[part.split, part.digest(), None if part.labels is None else part.labels.tolist()] for part in used]


def _check_labelled(task: Task, split: str) -> None:
    examples = task[split]
    if len(examples) == 0:
        raise RecipeError(f"the {split} split of task {task.name!r} is empty; it must have examples")
    if examples.labels is None:
        raise RecipeError(f"the {split} split of task {task.name!r} has no labels; give labelled examples")
