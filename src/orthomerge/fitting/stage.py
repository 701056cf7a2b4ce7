"""All that a fit works with, made once from a recipe and its inputs: base, experts, heads, teachers' features.

Experts and merges are written as output folders (docs/adr/0005) and read back through the stock classes, so that
adapters, other writers' names and CLIP need no care here; weights are those of the loaded modules.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from orthomerge.errors import RecipeError
from orthomerge.evaluation.bench import Bench
from orthomerge.experts import write_expert
from orthomerge.features.extract import device_of
from orthomerge.fitting.inputs import Inputs, prepare
from orthomerge.fitting.kinds import Setting
from orthomerge.fitting.layout import FlatEncoder, Layout
from orthomerge.manifest import read_manifest
from orthomerge.merged import Merged, load, load_head
from orthomerge.pipeline import merge
from orthomerge.suites.suite import output_name

if TYPE_CHECKING:
    from orthomerge.data.processing import Processor
    from orthomerge.data.task import Split, Task
    from orthomerge.features.cache import FeatureCache
    from orthomerge.heads import Head
    from orthomerge.recipe import Recipe
    from orthomerge.tuning.state import RunState

__all__ = ["Stage"]


@dataclass(frozen=True)
class Stage:
    """`recipe`: experts and base, whatever its method. `folder`: for outputs on the way. `tasks`: the inputs.

    `every`: seconds between two states on disk.
    """

    recipe: Recipe
    folder: Path
    tasks: Mapping[str, Task]
    split: Split
    processor: Processor
    cache: FeatureCache
    device: str = "auto"
    half: bool = False
    batch: int = 64
    say: Callable[[str], None] = lambda text: None
    about: dict[str, dict[str, Any]] = field(default_factory=dict)  # by task: what identifies its expert
    every: float | None = None

    @cached_property
    def origin(self) -> Path:
        """The base under the experts' heads."""
        return self.output("task_arithmetic", {"scale": 0.0})

    @cached_property
    def model(self) -> Merged:
        """The module that everything is computed with."""
        return load(self.origin)

    @cached_property
    def encoder(self) -> FlatEncoder:
        model = self.model
        pool = partial(model.family.features, pooling=model.pooling)
        return FlatEncoder(model.encoder, pool, device_of(self.device))

    @cached_property
    def base(self) -> torch.Tensor:
        """[P] on the CPU."""
        return self._weights(self.origin)

    @cached_property
    def heads(self) -> dict[str, Head]:
        return {task: load_head(self.origin / "heads" / task) for task in self.recipe.experts}

    @cached_property
    def bench(self) -> Bench:
        return Bench(
            self.tasks, self.processor, cache=self.cache, device=self.device, batch=self.batch, progress=self.say
        )

    @cached_property
    def teacher(self) -> Mapping[str, torch.Tensor]:
        """The features [n, d] that each task's expert makes of its own inputs."""
        missing = [task for task in self.recipe.experts if task not in self.tasks]
        if missing:
            raise RecipeError(f"inputs of {missing[0]!r} are needed to fit it; give --data {missing[0]}=PATH")
        teacher = {}
        for task in self.heads:
            teacher[task] = self.bench.features(self.expert(task), task, self.split).values
            self.bench.forget()
        return teacher

    @cached_property
    def inputs(self) -> Inputs:
        """All inputs with the experts' features."""
        teacher = self.teacher
        examples = {task: self.tasks[task][self.split] for task in self.heads}
        self.say("preparing the inputs")
        return prepare(examples, self.processor, teacher, device=device_of(self.device))

    def setting(
        self, *, inputs: Inputs | None = None, seed: int | None = None, state: RunState | None = None
    ) -> Setting:
        """What a method is given; `inputs`: some of them."""
        return Setting(
            self.encoder,
            self.base,
            self.tuned,
            self.merged,
            self.heads,
            self.inputs if inputs is None else inputs,
            self.recipe.seed if seed is None else seed,
            self.half,
            self.say,
            state,
            self.every,
        )

    def expert(self, task: str) -> Path:
        """An expert's output folder."""
        out = self.folder / f"expert-{task}"
        if not out.exists():
            manifest = read_manifest(self.origin)
            labels = tuple(manifest["heads"][task]["labels"])
            family, pooling = self.model.family, manifest["pooling"]
            self.about[task] = write_expert(self.recipe, task, out, family=family, pooling=pooling, labels=labels)
        return out

    def tuned(self, task: str) -> torch.Tensor:
        """An expert's weights, [P] on the CPU."""
        return self._weights(self.expert(task))

    def merged(self, method: str, options: Mapping[str, Any]) -> torch.Tensor:
        """What a merge without data makes, [P] on the CPU."""
        return self._weights(self.output(method, options))

    def output(self, method: str, options: Mapping[str, Any]) -> Path:
        """A merge without data, in float32."""
        out = self.folder / output_name(method, options)
        if not out.exists():
            plainly = replace(
                self.recipe, method=method, parameters=dict(options), dtype="float32", align=None, fit=None
            )
            merge(plainly, out=out)
        return out

    def clear(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _weights(self, out: Path) -> torch.Tensor:
        encoder = load(out).encoder
        return Layout.of(encoder).flat(dict(encoder.named_parameters()))
