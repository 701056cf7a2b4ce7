"""Carrying out a recipe with a fitted method: unlabelled inputs go through the encoder, and one output comes out.

The output is as large as that of any other merge: masks and coefficients are in the weights, maps in the heads. Only a
classifier that is more than a head adds a file.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from orthomerge.aligned import Fitted as FittedTask
from orthomerge.aligned import save_fitted
from orthomerge.alignment.aligner import Alignment
from orthomerge.checkpoints.checkpoint import Checkpoint, torch_dtype
from orthomerge.checkpoints.opening import open_checkpoint
from orthomerge.checkpoints.publish import publish
from orthomerge.checkpoints.replacing import os_errors
from orthomerge.data.processing import load_processor
from orthomerge.data.reading import read_inputs
from orthomerge.errors import IncompatibleError, NumericalError, RecipeError
from orthomerge.experts import local_paths
from orthomerge.features.cache import FeatureCache
from orthomerge.features.extract import device_of
from orthomerge.fitting.inputs import encoded
from orthomerge.fitting.stage import Stage
from orthomerge.kinship import check_kinship
from orthomerge.models.load import quiet
from orthomerge.models.split import split_base
from orthomerge.output import README, copy_files, finish_output, plain, versions, write_output
from orthomerge.pipeline import Progress, Result, copied_tensor, task_vectors
from orthomerge.planning import make_plan
from orthomerge.threads import fixed_threads
from orthomerge.tuning.state import RunState
from orthomerge.version import VERSION

if TYPE_CHECKING:
    from orthomerge.data.processing import Processor
    from orthomerge.data.task import Task
    from orthomerge.fitting.kinds import Fitted, FittedMethod
    from orthomerge.planning import Job
    from orthomerge.recipe import Fit, Recipe

__all__ = ["merge_fitted", "write_fitted"]

_WORK = ".work"  # inside the folder that becomes the output: whatever clears that away clears this too


def merge_fitted(
    recipe: Recipe,
    *,
    to: str | Path,
    force: bool = False,
    progress: Progress | None = None,
    processor: Processor | None = None,
    cache: FeatureCache | None = None,
) -> Result:
    """Carry out a recipe whose method is fitted to inputs."""
    if recipe.fit is None:
        raise RecipeError(f"{recipe.method!r} is fitted to inputs: give --data TASK=PATH for every expert, or 'fit'")
    job = make_plan(replace(recipe, out=str(to))).check()
    check_kinship(job, task_vectors(job))
    paths = [*(source.path for source in job.sources.values()), *local_paths(recipe, recipe.fit.data)]
    state: RunState | None = None
    with publish(Path(to), force=force, need=(len(job.experts) + 3) * job.bytes_to_write, inputs=paths) as partial:
        stage = _stage(recipe, recipe.fit, job, partial / _WORK, processor, cache, progress)
        state = _state(recipe, job, stage, Path(to)) if recipe.fit.resume else None
        with fixed_threads():
            made = cast("FittedMethod", job.method).fit(stage.setting(state=state))
            manifest = write_fitted(job, stage, made, partial)
    if state is not None:
        state.remove()
    return Result(Path(to), manifest)


def write_fitted(job: Job, stage: Stage, made: Fitted, folder: Path) -> dict[str, Any]:
    """Fill a folder with an encoder and its classifiers; removes the stage's files if they lie in it."""
    result = stage.folder / "result"
    stage.encoder.load(made.weights)
    with closing(_blocks(job, stage)) as blocks:
        manifest = write_output(job, stage.heads, blocks, out=result)
    changed = {task: each for task, each in made.classifiers.items() if each is not stage.heads[task]}
    heads = tuple(f"heads/{task}/" for task in changed)
    kept = {name: row for name, row in manifest["files"].items() if name != README and not name.startswith(heads)}
    copy_files(result, folder, kept)
    extra = {}
    for task, classifier in changed.items():
        some = {task: stage.inputs.rows[task][:256]}
        sample = encoded(stage.encoder, stage.inputs.only(some), task).cpu()
        fitted = FittedTask(task, Alignment(classifier), stage.heads[task], sample, {})
        extra[task] = save_fitted(folder / "heads" / task, fitted)["extra"]
    about = _about(job, stage, made, extra)
    if folder in stage.folder.parents:
        shutil.rmtree(stage.folder)  # whatever could not be removed would be a part of the output
    else:
        shutil.rmtree(result)
    return finish_output(folder, {**manifest, "fit": about}, kept)


def _stage(
    recipe: Recipe,
    fit: Fit,
    job: Job,
    folder: Path,
    processor: Processor | None,
    cache: FeatureCache | None,
    progress: Progress | None,
) -> Stage:
    def say(text: str) -> None:
        if progress is not None:
            progress.stage(text, None)

    tasks = {task: _inputs(recipe, fit, job, task) for task in job.experts}
    modality = next(iter(tasks.values())).modality
    half = fit.precision == "bfloat16" or (fit.precision == "auto" and device_of(fit.device).type == "cuda")
    stage = Stage(
        recipe,
        folder,
        tasks,
        fit.split,
        cast("Processor", processor),
        cache or FeatureCache(),
        device=fit.device,
        half=half,
        say=say,
        every=fit.save_every,
    )
    if processor is None:
        stage = replace(stage, processor=load_processor(stage.origin / "encoder", modality=modality))
    return stage


def _inputs(recipe: Recipe, fit: Fit, job: Job, task: str) -> Task:
    if task not in fit.data:
        raise RecipeError(f"inputs of {task!r} are needed to fit it; give --data {task}=PATH")
    labels = job.experts[task].labels
    found = read_inputs(fit.data[task], name=task, labels=labels, split=fit.split, limit=fit.limit, seed=recipe.seed)
    if found.modality != job.family.modality:
        raise IncompatibleError(
            f"{job.family.title} reads inputs of modality {job.family.modality!r}, but those of {task!r} are "
            f"{found.modality!r}; give the data that its expert was trained on"
        )
    return found


def _blocks(job: Job, stage: Stage) -> Generator[tuple[str, torch.Tensor], None, None]:
    """The encoder's tensors under their canonical names, in the order and dtype of the output."""
    saved = stage.folder / "saved"
    module: Any = stage.encoder.module
    with quiet(), os_errors():
        module.save_pretrained(saved)
    found = open_checkpoint(saved)
    found = job.family.adapt(found) if job.family.adapt else found
    names = split_base(_specs(found), job.family).names
    for key, spec in job.specs.items():
        if key in job.copied or key not in names:
            yield key, copied_tensor(job, key)
            continue
        weights = found.read(names[key], 0, spec.numel)
        cast = weights.to(torch_dtype(spec.dtype))
        if not torch.isfinite(cast.float()).all():
            largest = float(weights.abs().max())
            raise NumericalError(
                f"{key!r} does not fit into {spec.dtype} after the fit (largest magnitude {largest:.3g}); "
                "use --dtype float32 or bfloat16, or lower 'lr'"
            )
        yield key, cast
    shutil.rmtree(saved)


def _specs(found: Checkpoint) -> dict[str, Any]:
    return {key: found.spec(key) for key in (*found, *found.aliases)}


def _about(job: Job, stage: Stage, made: Fitted, extra: dict[str, Any]) -> dict[str, Any]:
    """What the manifest says of the fit."""
    fit = job.recipe.fit
    return {
        "split": stage.split,
        "access": "transductive" if stage.split == "test" else "inductive",
        "precision": "bfloat16" if stage.half else "float32",
        "device": (stage.encoder.device if fit is None else device_of(fit.device)).type,
        "facts": plain(made.facts),
        # Without the clock: the same recipe gives the same bytes.
        "curve": plain([{name: value for name, value in row.items() if name != "seconds"} for row in made.curve]),
        "tasks": {
            task: {
                "inputs": len(stage.inputs.rows[task]),
                "data": f"sha256:{stage.tasks[task][stage.split].digest()}",
                "extra": extra.get(task, {"parameters": 0, "bytes": 0}),
            }
            for task in job.experts
        },
        "versions": versions(),
    }


def _state(recipe: Recipe, job: Job, stage: Stage, out: Path) -> RunState:
    """Where a killed run of the same recipe on the same files and inputs left its state, if it did."""
    files = [file.path for source in job.sources.values() for file in source.files]
    seen = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    inputs = [task[stage.split].digest() for task in stage.tasks.values()]
    about = asdict(replace(recipe, out=None, fit=None)), stage.split, stage.half
    digest = hashlib.sha256(repr((VERSION, about, seen, inputs)).encode()).hexdigest()
    out = out.expanduser().absolute()
    return RunState(out.parent / f".{out.name}.fitting", digest)
