"""Aligning an output: each task's head is fitted to the merged encoder, by what its expert makes of the same inputs.

The encoder is copied byte for byte and heads keep shape and dtype, so that the new output is as large as the old one;
only an aligner whose classifier is more than a head adds a file. Labels are dropped before anything sees the inputs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.aligned import Fitted, save_fitted
from orthomerge.checkpoints.files import RawFile
from orthomerge.checkpoints.publish import MANIFEST, publish
from orthomerge.classifiers import load_head
from orthomerge.errors import IncompatibleError, RecipeError, nearest
from orthomerge.experts import is_zero_shot, local_paths, write_expert
from orthomerge.features.extract import device_of
from orthomerge.manifest import manifest_family, read_manifest
from orthomerge.output import README, copy_files, finish_output, plain, versions
from orthomerge.pipeline import Progress, Result, merge
from orthomerge.planning import make_plan
from orthomerge.recipe import Align, Expert, Recipe
from orthomerge.strict import schema
from orthomerge.version import VERSION

if TYPE_CHECKING:
    import torch

    from orthomerge.alignment.aligner import Aligner, Alignment
    from orthomerge.data.processing import Processor
    from orthomerge.data.reading import Source
    from orthomerge.data.task import Split, Task
    from orthomerge.evaluation.bench import Bench
    from orthomerge.features.cache import FeatureCache
    from orthomerge.heads import Head
    from orthomerge.models.family import Family

__all__ = ["Aligning", "align", "align_merge", "chosen_aligner", "merge_aligned"]

_WORK = ".work"  # inside the folder that becomes the output: whatever clears that away clears this too


def align(
    path: str | Path,
    *,
    data: Mapping[str, Source | Task],
    experts: Mapping[str, str | Path | Expert],
    to: str | Path,
    aligner: str = "auto",
    options: Mapping[str, Any] | None = None,
    base: str | Path | None = None,
    split: Split = "train",
    limit: int | None = None,
    seed: int = 0,
    device: str = "auto",
    batch: int = 64,
    processor: Processor | None = None,
    cache: FeatureCache | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Write the output `path` once more, to `to`, with the heads of all tasks that have data aligned.

    `data`: inputs by task, each a `Task` or what `read_task` reads; `experts`: the expert of each of these tasks.
    `base` is needed where an expert is not a whole model with its own head: adapters, bare files, CLIP. `split`: with
    "test" the output says that whatever is measured there is transductive. `limit`: at most so many inputs a task,
    drawn by `seed`.
    """
    settings = Align(dict.fromkeys(data, ""), aligner, dict(options or {}), split, limit)
    source = Path(path)
    manifest = read_manifest(source)
    _check(source, manifest, data, experts)
    chosen_aligner(aligner, settings.options, seed=seed)
    device_of(device)
    given = {task: each if isinstance(each, Expert) else Expert(str(each)) for task, each in experts.items()}
    like = Recipe(experts=given, base=None if base is None else str(base), seed=seed)
    run = Aligning(source, like, settings, data, device, batch, processor, cache, progress)
    need = 2 * sum(file["size"] for file in manifest["files"].values())  # every expert is written out for a while
    with publish(Path(to), force=force, need=need, inputs=[source, *local_paths(like, data)]) as partial:
        made = run.write(partial)
    return Result(Path(to), made)


def merge_aligned(
    recipe: Recipe, *, to: str | Path, force: bool = False, progress: Progress | None = None, device: str = "auto"
) -> Result:
    """Carry out a recipe with a block `align`; nothing but the aligned output is left."""
    if recipe.align is None:
        raise RecipeError("the recipe has no block 'align'; add one, or merge without")
    job = make_plan(replace(recipe, out=str(to))).check()
    inputs = [*(source.path for source in job.sources.values()), *local_paths(recipe, recipe.align.data)]
    with publish(Path(to), force=force, need=3 * job.bytes_to_write, inputs=inputs) as partial:
        source = merge(replace(recipe, align=None), out=partial / _WORK / "merged", progress=progress).out
        run = Aligning(source, recipe, recipe.align, recipe.align.data, device=device, progress=progress)
        made = run.write(partial)
    return Result(Path(to), made)


def align_merge(
    source: Path, recipe: Recipe, *, to: Path, force: bool = False, progress: Progress | None = None
) -> Result:
    """The second half of a recipe with a block `align`, from `source`, which the first half wrote."""
    if recipe.align is None:
        raise RecipeError("the recipe has no block 'align'; add one, or leave the merge as it is")
    need = 2 * sum(file["size"] for file in read_manifest(source)["files"].values())
    with publish(to, force=force, need=need, inputs=[source, *local_paths(recipe, recipe.align.data)]) as partial:
        made = Aligning(source, recipe, recipe.align, recipe.align.data, progress=progress).write(partial)
    return Result(to, made)


def chosen_aligner(name: str, options: Mapping[str, Any], *, seed: int) -> Aligner:
    """An aligner with its options; one that draws at random gets the seed, unless its options have one."""
    from orthomerge.alignment.aligners import aligner_class, find_aligner, make_aligner

    drawn = {"seed": seed} if "seed" in schema(aligner_class(find_aligner(name))) else {}
    return make_aligner(name, {**drawn, **options})


def _check(source: Path, manifest: dict[str, Any], data: Mapping[str, Any], experts: Mapping[str, Any]) -> None:
    """What can be told from the manifest alone."""
    if "alignment" in manifest:
        by = manifest["alignment"]["aligner"]
        raise RecipeError(f"{source} has been aligned already, by {by!r}; align the merge that it was made from")
    if not manifest_family(manifest, source).encoder_class:
        raise RecipeError(
            f"{source} is of a module of your own, which cannot be built here; make the features yourself, "
            "and give them to an aligner of orthomerge.alignment.aligners"
        )
    for task in (*data, *experts):
        if task not in manifest["heads"]:
            raise RecipeError(f"{source} has no task {task!r}; {nearest(task, manifest['heads'])}")
        if task not in experts:
            raise RecipeError(f"the expert of {task!r} is what its head is aligned with; give --expert {task}=PATH")
        if task not in data:
            raise RecipeError(f"the expert of {task!r} is of no use without inputs; give --data {task}=PATH")


@dataclass(frozen=True)
class Aligning:
    """One alignment of the output `source`. `like`: a recipe with the experts, and how they are read."""

    source: Path
    like: Recipe
    settings: Align
    data: Mapping[str, Source | Task]
    device: str = "auto"
    batch: int = 64
    processor: Processor | None = None
    cache: FeatureCache | None = None
    progress: Progress | None = None

    def write(self, folder: Path) -> dict[str, Any]:
        """Fill a folder with the aligned output, and give its manifest."""
        kept = self.kept
        copy_files(self.source, folder, kept)
        found = {fitted.task: save_fitted(folder / "heads" / fitted.task, fitted) for fitted in self._fits(folder)}
        return self.complete(folder, found, kept)

    def complete(
        self, folder: Path, found: Mapping[str, Mapping[str, Any]], kept: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Card and manifest, where encoder and heads lie; `found`: what `save_fitted` said of every task."""
        about = self._about(found)
        if (folder / _WORK).exists():
            shutil.rmtree(folder / _WORK)  # whatever could not be removed would be a part of the output
        notes = [*self.manifest["notes"], *self._notes(found)]
        merged = {part: value for part, value in self.manifest.items() if part != "evaluation"}  # it was of other heads
        return finish_output(folder, {**merged, "notes": notes, "alignment": about}, kept)

    @property
    def kept(self) -> dict[str, Any]:
        """The files of the merge that stay as they are."""
        heads = tuple(f"heads/{task}/" for task in self.data)
        files = self.manifest["files"].items()
        return {name: facts for name, facts in files if name != README and not name.startswith(heads)}

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return read_manifest(self.source)

    @cached_property
    def family(self) -> Family:
        return manifest_family(self.manifest, self.source)

    @cached_property
    def aligner(self) -> Aligner:
        given = self.settings
        return chosen_aligner(given.aligner, given.options, seed=self.like.seed)

    @cached_property
    def tasks(self) -> dict[str, Task]:
        """The inputs of every task, in one split and without labels."""
        return {task: self._inputs(task, source) for task, source in self.data.items()}

    @cached_property
    def bench(self) -> Bench:
        from orthomerge.data.processing import load_processor
        from orthomerge.evaluation.bench import Bench
        from orthomerge.features.cache import FeatureCache

        modality = next(iter(self.tasks.values())).modality
        return Bench(
            self.tasks,
            self.processor or load_processor(self.source / "encoder", modality=modality),
            cache=self.cache or FeatureCache(),
            device=self.device,
            batch=self.batch,
            progress=self._say,
        )

    def _inputs(self, task: str, source: Source | Task) -> Task:
        from orthomerge.data.reading import read_inputs

        given, labels = self.settings, tuple(self.manifest["heads"][task]["labels"])
        found = read_inputs(source, name=task, labels=labels, split=given.split, limit=given.limit, seed=self.like.seed)
        if found.modality != self.family.modality:
            raise IncompatibleError(
                f"{self.source} reads inputs of modality {self.family.modality!r}, but those of {task!r} are "
                f"{found.modality!r}; give the data that its expert was trained on"
            )
        return found

    def _fits(self, folder: Path) -> Iterator[Fitted]:
        """One task after the other; merged features first, so that the merged encoder is loaded once."""
        for task in self.tasks:
            self.bench.features(self.source, task, self.settings.split)
            self.bench.forget()
        for task in self.tasks:
            out = folder / _WORK / "experts" / task
            old = load_head(self.source / "heads" / task)
            read = {"family": self.family, "pooling": self.manifest["pooling"], "labels": old.labels}
            expert = write_expert(self.like, task, out, **read)
            self._say(f"aligning {task} by {self.settings.aligner}")
            made, sample = self.in_memory(task, out, self.head(task, out))
            self.bench.forget()
            shutil.rmtree(out)
            yield Fitted(task, made, old, sample, expert)

    def in_memory(self, task: str, expert: Path, head: Head) -> tuple[Alignment, torch.Tensor]:
        from orthomerge.features.features import FeaturePair
        from orthomerge.merging.stream import single_threaded

        pair = FeaturePair(*(self.bench.features(each, task, self.settings.split) for each in (self.source, expert)))
        with single_threaded():  # what is summed up by several threads depends on their number
            return self.aligner.fit(pair, head), pair.merged.values

    def head(self, task: str, expert: Path) -> Head:
        """The expert's own head, its rows named as those of the output."""
        old = load_head(self.source / "heads" / task)
        if is_zero_shot(self.like.tasks[task], self.family):
            return old  # templates are not written down, but this is what they gave
        found = load_head(expert / "heads" / task)
        numbered = tuple(f"LABEL_{number}" for number in range(len(found.labels)))
        if found.labels not in (old.labels, numbered) or len(found.labels) != len(old.labels):
            raise IncompatibleError(
                f"the expert of {task!r} has other labels than the head in {self.source}, or another order; "
                "give the expert that was merged, with the same 'labels'"
            )
        return replace(found, labels=old.labels)

    def _about(self, found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """What the manifest says of the alignment."""
        given, tasks = self.settings, {task: inputs[self.settings.split] for task, inputs in self.tasks.items()}
        return {
            "orthomerge": VERSION,
            "aligner": given.aligner,
            "options": plain({name: getattr(self.aligner, name) for name in schema(type(self.aligner))}),
            "seed": self.like.seed,
            "split": given.split,
            "limit": given.limit,
            "access": "transductive" if given.split == "test" else "inductive",
            "merge": RawFile(self.source / MANIFEST).digest(),
            "tasks": {
                task: {"inputs": len(tasks[task]), "data": f"sha256:{tasks[task].digest()}", **facts}
                for task, facts in found.items()
            },
            "versions": versions(),
        }

    def _notes(self, found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
        for task, given in self.manifest["inputs"]["experts"].items():
            if task not in found:
                yield f"no data of {task!r} was given to align it with; its head is as it was merged"
            elif given["files"] != found[task]["expert"]["files"]:
                yield f"the expert that {task!r} was aligned with is not, byte for byte, the one that was merged"

    def _say(self, text: str) -> None:
        if self.progress is not None:
            self.progress.stage(text, None)
