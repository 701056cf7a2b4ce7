"""From a base and tasks to experts, trained and written: what `finetune` and `finetune_jointly` share."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from orthomerge.core.errors import IncompatibleError, NumericalError, RecipeError
from orthomerge.data.task import Examples
from orthomerge.files.opening import open_checkpoint
from orthomerge.models.linearised import LinearisedEncoder
from orthomerge.tuning.batches import Feed, check_labelled
from orthomerge.tuning.loop import Outcome, Progress, Run, count_steps, fit_head, train
from orthomerge.tuning.lora import add_adapter
from orthomerge.tuning.model import Model, OrdinaryEncoder, choose_family, load_base, start_head
from orthomerge.tuning.saving import write_adapter, write_expert
from orthomerge.tuning.settings import LINEARISED, PROBED, Tuning, choose_device, derive
from orthomerge.tuning.state import RunState, fingerprint
from orthomerge.tuning.store import Room

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from orthomerge.data.task import Task
    from orthomerge.models.family import Family
    from orthomerge.models.heads import Head
    from orthomerge.models.processing import Processor


_ROOM = 2 << 30  # bytes for processed inputs


@dataclass(frozen=True)
class Making:
    """One run, described. `head`: to start from, or to keep (`frozen_head`, and families without one of their own)."""

    title: str
    tasks: Sequence[Task]
    base: Path
    settings: Tuning
    processor: Processor
    others: Sequence[Examples] = ()
    head: Head | None = None
    family: str | None = None
    progress: Progress | None = None

    def check(self) -> Family:
        """Everything that can be wrong before a model is loaded."""
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
        choose_device(self.settings.device)
        return family

    @property
    def bytes_to_write(self) -> int:
        """Of one expert in float32."""
        checkpoint = open_checkpoint(self.base)
        return sum(4 * checkpoint.spec(name).numel for name in checkpoint)

    def run(self, folders: Mapping[str, Path], *, state: Path | None) -> dict[str, dict[str, float]]:
        """Train, and fill a folder for each task; `state` is where an unfinished run is kept."""
        family, device = self.check(), choose_device(self.settings.device)
        kept = None if state is None else RunState(state, self._fingerprint(family))
        with torch.random.fork_rng(devices=_numbers(device)):
            torch.manual_seed(derive(self.settings.seed, "model"))
            run = self._run(device, kept)
            model, names, adapted = self._model(family, run)
            try:
                outcome = self._train(model, run)
            except NumericalError:
                if kept is not None:
                    kept.remove()  # going on from there would end there again
                raise
        model.to("cpu")
        self._write(model, names, adapted, outcome, folders, family=family)
        return {
            task.name: {**values, "steps": outcome.steps}
            for task, values in zip(self.tasks, outcome.metrics, strict=True)
        }

    def _run(self, device: torch.device, state: RunState | None) -> Run:
        parts = [check_labelled(task, "train") for task in self.tasks]
        nothing = Examples([], None, "val")
        val = [check_labelled(task, "val") if "val" in task.splits else nothing for task in self.tasks]
        others = [part for part in self.others if len(part)] if self.settings.mode == "tau_jp" else []
        sizes, other_sizes = tuple(map(len, parts)), tuple(map(len, others))
        steps, room = count_steps(self.settings, sizes), _room(device)
        # What is not read once through is cheaper to process as it comes.
        kept = room if steps * self.settings.batch >= sum(sizes) else None
        kept_others = room if steps * self.settings.penalty_batch >= sum(other_sizes) else None
        return Run(
            title=self.title,
            settings=self.settings,
            device=device,
            train=Feed(parts, self.processor, device, room=kept),
            sizes=sizes,
            val=Feed(val, self.processor, device, room=kept),
            val_sizes=tuple(map(len, val)),
            others=Feed(others, self.processor, device, room=kept_others),
            other_sizes=other_sizes,
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
        skeleton = load_base(self.base, family, pooling, eager=linearised)
        if linearised:
            encoding: OrdinaryEncoder | LinearisedEncoder = LinearisedEncoder(family, pooling, skeleton.module)
        else:
            encoding = OrdinaryEncoder(family, pooling, skeleton.module)
        encoding.to(run.device)
        with torch.no_grad():
            batch, _ = run.train.batch((0, [0]))
            width = encoding.eval()(batch).shape[1]
        heads = [
            start_head(
                self.head,
                family.head,
                task.labels,
                width=width,
                generator=torch.Generator().manual_seed(derive(settings.seed, "head", number)),
            )
            for number, task in enumerate(self.tasks)
        ]
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
        return fingerprint(
            self.tasks,
            base=self.base,
            settings=self.settings,
            processor=self.processor,
            family=family.name,
            others=self.others,
            head=self.head,
        )


def _room(device: torch.device) -> Room:
    """For processed inputs; on a GPU no more than a quarter of what is free."""
    return Room(_ROOM if device.type != "cuda" else min(_ROOM, torch.cuda.mem_get_info(device)[0] // 4))


def _numbers(device: torch.device) -> list[int]:
    """The GPU whose random state is ours to change for a while."""
    if device.type != "cuda":
        return []
    return [torch.cuda.current_device() if device.index is None else device.index]
