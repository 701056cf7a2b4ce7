"""Make experts: fine-tune a base on one task, or on all tasks at once with one encoder (the MTL row of the papers)."""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from orthomerge.core.device import derive, device_of, free_memory
from orthomerge.core.errors import IncompatibleError, NumericalError, RecipeError
from orthomerge.core.version import VERSION
from orthomerge.data.task import Examples
from orthomerge.files.folders import EXPERT
from orthomerge.files.opening import open_checkpoint
from orthomerge.files.publish import publish
from orthomerge.files.run_state import RunState, clear_state, state_folder
from orthomerge.models.networks import LinearisedEncoder
from orthomerge.tuning.batches import Feed, check_labelled
from orthomerge.tuning.loop import Outcome, Progress, Run, count_steps, fit_head, train
from orthomerge.tuning.lora import add_adapter
from orthomerge.tuning.model import Model, OrdinaryEncoder, choose_family, load_base, start_head
from orthomerge.tuning.saving import write_adapter, write_expert
from orthomerge.tuning.settings import LINEARISED, PROBED, Tuning

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from orthomerge.data.task import Task
    from orthomerge.models.family import Family
    from orthomerge.models.heads import Head
    from orthomerge.models.processing import Processor


_ROOM = 2 << 30  # bytes for processed inputs, at most
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
    progress: Progress | None = None,
    force: bool = False,
    resume: bool = True,
    inputs: Iterable[Path] = (),
) -> dict[str, float]:
    """Fine-tune `base` on a task's train split and write the expert to `out`; the metrics of the last epoch.

    `others`: inputs of other tasks, for `tau_jp`. `head`: to start from; `frozen_head`, and CLIP without a linear
    head, keep it as it is. `resume`: keep the state of every epoch beside `out`, so that a killed run can continue.
    `inputs`: the files that `task` and `others` were read from, which `out` must not overlap.
    A `linearised` or `tau_jp` expert is written as ordinary weights, but must be evaluated as the linear model that it
    is: see `Model.linearised`.
    """
    run = _Training(task.name, [task], base, settings, processor, others, head, family, progress)
    metrics = run.written({task.name: out}, state_folder(out, "tuning"), force=force, resume=resume, inputs=inputs)
    return metrics[task.name]


def finetune_jointly(
    tasks: Mapping[str, Task],
    *,
    base: Path,
    out_root: Path,
    settings: Tuning,
    processor: Processor,
    family: str | None = None,
    progress: Progress | None = None,
    force: bool = False,
    resume: bool = True,
) -> dict[str, dict[str, float]]:
    """Train on the batches of all tasks, each as often as its size requires, in an order drawn by the seed.

    Writes a classifier for each task to `out_root`/NAME: the same encoder in each, with the task's head.
    """
    if settings.mode not in _JOINT:
        raise RecipeError(f"joint training must have mode {' or '.join(_JOINT)}, got {settings.mode!r}")
    if not tasks:
        raise RecipeError("joint training needs at least one task, got none")
    for name in tasks:
        if Path(name).name != name:
            raise RecipeError(f"{name!r} cannot name a task here: it becomes the name of a folder")
    named = [replace(task, name=name) for name, task in tasks.items()]
    run = _Training("joint", named, base, settings, processor, family=family, progress=progress)
    outs = {name: out_root / name for name in tasks}
    return run.written(outs, state_folder(out_root, "tuning"), force=force, resume=resume)


@dataclass(frozen=True)
class _Training:
    """Training of one encoder on some tasks; the fields are the arguments of `finetune`."""

    title: str
    tasks: Sequence[Task]
    base: Path
    settings: Tuning
    processor: Processor
    others: Sequence[Examples] = ()
    head: Head | None = None
    family: str | None = None
    progress: Progress | None = None

    def written(
        self, outs: Mapping[str, Path], state: Path, *, force: bool, resume: bool, inputs: Iterable[Path] = ()
    ) -> dict[str, dict[str, float]]:
        """Train and write a folder for each task; the metrics of each."""
        family = self._checked()
        checkpoint = open_checkpoint(self.base)
        need = sum(4 * checkpoint.spec(name).numel for name in checkpoint)  # one expert in float32
        taken = [self.base, *inputs]
        with ExitStack() as stack:
            folders = {
                name: stack.enter_context(publish(out, force=force, need=need, inputs=taken, marker=EXPERT))
                for name, out in outs.items()
            }
            metrics = self._run(family, folders, RunState(state, self._fingerprint(family)) if resume else None)
        clear_state(state)
        return metrics

    def _checked(self) -> Family:
        """The family; everything that can be wrong is refused before a model is loaded."""
        mode = self.settings.mode
        for task in self.tasks:
            check_labelled(task, "train")
        family = choose_family(self.base, self.family, head=self.head)
        if family.head is None and mode in ("full", "head_first"):
            raise RecipeError(
                f"family {family.name!r} has no head that could be trained and saved, as mode {mode!r} would; "
                "use frozen_head, lora, linearised or tau_jp"
            )
        wrong = next((task for task in self.tasks if task.modality != family.modality), None)
        if wrong is not None:
            raise IncompatibleError(
                f"task {wrong.name!r} is of modality {wrong.modality!r}, but family {family.name!r} reads "
                f"{family.modality!r}; choose another base"
            )
        if mode == "frozen_head" and self.head is None:
            raise RecipeError("mode 'frozen_head' needs the head that is kept: give `head` (CLIP: zero_shot_head)")
        if mode == "tau_jp" and not any(len(part) for part in self.others):
            raise RecipeError("mode 'tau_jp' needs inputs of other tasks to keep still on: give `others`")
        if self.settings.augment != "none" and family.modality != "image":
            raise RecipeError(
                f"'augment' must be none for a family that reads {family.modality!r}, got {self.settings.augment!r}: "
                "only images can be moved; leave it out"
            )
        device_of(self.settings.device)
        return family

    def _run(self, family: Family, folders: Mapping[str, Path], state: RunState | None) -> dict[str, dict[str, float]]:
        device = device_of(self.settings.device)
        own = [] if device.type != "cuda" else [torch.cuda.current_device() if device.index is None else device.index]
        with torch.random.fork_rng(devices=own):
            torch.manual_seed(derive(self.settings.seed, "model"))
            run = self._feeds(device, state)
            model, names, adapted = self._model(family, run)
            try:
                outcome = self._train(model, run)
            except NumericalError:
                if state is not None:
                    state.remove()  # a run that continued from there would end there again
                raise
        model.to("cpu")
        self._write(model, names, adapted, outcome, folders, family=family)
        return {
            task.name: {**values, "steps": outcome.steps}
            for task, values in zip(self.tasks, outcome.metrics, strict=True)
        }

    def _feeds(self, device: torch.device, state: RunState | None) -> Run:
        settings, nothing = self.settings, Examples([], None, "val")
        train = [check_labelled(task, "train") for task in self.tasks]
        val = [check_labelled(task, "val") if "val" in task.splits else nothing for task in self.tasks]
        others = [part for part in self.others if len(part)] if settings.mode == "tau_jp" else []
        steps, room = count_steps(settings, list(map(len, train))), min(_ROOM, free_memory(device) // 4)
        # Inputs that are used less than once each are cheaper to process as they come.
        kept = room if steps * settings.batch >= sum(map(len, train)) else 0
        kept_others = room if steps * settings.penalty_batch >= sum(map(len, others)) else 0
        return Run(
            title=self.title,
            settings=settings,
            device=device,
            train=Feed(train, self.processor, device, room=kept),
            val=Feed(val, self.processor, device, room=kept),
            others=Feed(others, self.processor, device, room=kept_others),
            progress=self.progress,
            state=state,
        )

    def _model(self, family: Family, run: Run) -> tuple[Model, Mapping[str, str], Any]:
        """The model on its device, what is to be trained requiring a gradient; the names of its encoder's tensors on
        disk -> in its state dict; for `lora` the peft model.
        """
        settings = self.settings
        pooling = settings.pooling or family.default_pooling
        linearised = settings.mode in LINEARISED
        skeleton = load_base(self.base, family, pooling)
        encoding: OrdinaryEncoder | LinearisedEncoder
        encoding = (LinearisedEncoder if linearised else OrdinaryEncoder)(family, pooling, skeleton.module)
        encoding.to(run.device)
        with torch.no_grad():
            batch, _ = run.train.batch((0, [0]))
            width = encoding.eval()(batch).shape[1]
        heads = []
        for number, task in enumerate(self.tasks):
            generator = torch.Generator().manual_seed(derive(settings.seed, "head", number))
            heads.append(start_head(self.head, family.head, task.labels, width=width, generator=generator))
        model = Model(encoding, heads)
        adapted = add_adapter(model, family, base=self.base, settings=settings) if settings.mode == "lora" else None
        if settings.mode == "frozen_head" or family.head is None:
            model.heads.requires_grad_(False)
        return model.to(run.device), skeleton.names, adapted

    def _train(self, model: Model, run: Run) -> Outcome:
        saved = None if run.state is None else run.state.read()
        trains_heads = any(parameter.requires_grad for parameter in model.heads.parameters())
        if saved is None and trains_heads and self.settings.mode in PROBED:
            for number in range(len(self.tasks)):
                fit_head(model, run, number)
        return train(model, run, saved)

    def _write(
        self,
        model: Model,
        names: Mapping[str, str],
        adapted: Any,
        outcome: Outcome,
        folders: Mapping[str, Path],
        *,
        family: Family,
    ) -> None:
        encoder = model.encoding.tuned()
        for number, task in enumerate(self.tasks):
            notes = {
                "task": task.name,
                "family": family.name,
                "pooling": self.settings.pooling or family.default_pooling,
                "mode": self.settings.mode if len(self.tasks) == 1 else "multitask",
                "val_accuracy": outcome.metrics[number].get("val_accuracy"),
                "tuning": asdict(self.settings),
            }
            folder = folders[task.name]
            if adapted is not None:
                write_adapter(folder, adapted, task.labels, family=family, base=self.base, notes=notes)
            else:
                head = model.head(number).head(task.labels)
                write_expert(folder, encoder, names, head, family=family, base=self.base, notes=notes)

    def _fingerprint(self, family: Family) -> str:
        """A hash of everything that the result depends on."""
        head = {} if self.head is None else self.head.tensors()
        parts: dict[str, Any] = {
            "version": [VERSION, torch.__version__],
            "settings": asdict(self.settings),
            "family": family.name,
            "processor": self.processor.digest(),
            "base": [file.digest() for file in open_checkpoint(self.base).files],
            "tasks": [[task.name, task.labels, *map(_digests, _used(task))] for task in self.tasks],
            "others": [part.digest() for part in self.others],
            "head": {name: _digest(tensor.detach().cpu()) for name, tensor in head.items()},
        }
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _used(task: Task) -> list[Examples]:
    return [task[name] for name in ("train", "val") if name in task.splits]


def _digests(examples: Examples) -> list[str]:
    """Of inputs and labels."""
    labels = [] if examples.labels is None else [hashlib.sha256(examples.labels.tobytes()).hexdigest()]
    return [examples.split, examples.digest(), *labels]


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()
