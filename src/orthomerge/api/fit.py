"""Fit a merge to unlabelled inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from orthomerge.alignment.aligner import Alignment
from orthomerge.alignment.saving import as_saved
from orthomerge.core.errors import RecipeError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.core.threads import fixed_threads
from orthomerge.core.version import VERSION
from orthomerge.data.tasks import unlabelled_tasks
from orthomerge.fitting.assembling import setting_of
from orthomerge.fitting.inputs import encoded_rows
from orthomerge.merging.merge import check_merge, chosen_method, origin_of
from orthomerge.merging.merged import DTYPE_NAMES, copied_tensor
from orthomerge.models.encoding import Encoding
from orthomerge.models.extract import device_of
from orthomerge.models.reopening import short_hashes
from orthomerge.models.tensors import MemoryTensors
from orthomerge.models.writing import plain, versions
from orthomerge.tuning.state import RunState

if TYPE_CHECKING:
    from orthomerge.data.task import Examples, Split
    from orthomerge.fitting.kinds import Fitted, Setting
    from orthomerge.fitting.layout import FlatEncoder
    from orthomerge.models.experts import Experts
    from orthomerge.models.heads import Extra, Head
    from orthomerge.models.model import Model, Origin


_SAMPLE = 256  # inputs on which the rounding of a head is measured
_STATE = 2  # the form of a state on disk; those of another form are not read


def fit(
    experts: Experts,
    method: Any,
    data: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    *,
    dtype: str = "keep",
    seed: int = 0,
    device: str = "auto",
    split: Split = "train",
    limit: int | None = None,
    precision: Literal["auto", "float32", "bfloat16"] = "auto",
    state: Path | None = None,
    save_every: float | None = None,
    encoding: Encoding | None = None,
    progress: Progress = SILENT,
) -> Model:
    """Fit a merge to unlabelled inputs of every expert and return it as a model; nothing is written but `state`.

    `method`: a fitted method's name with its `options`, or an object. `data`: inputs by task, a `Task` or what can be
    read as one. `split`: "test" makes whatever is measured there transductive. `limit`: at most so many inputs per
    task, drawn by `seed`. `precision`: of training, bfloat16 or float32; auto is bfloat16 on a GPU. `state`: a folder
    from which a killed run of the same fit goes on; it is written every `save_every` seconds and never removed here.
    """
    name, chosen, used = chosen_method(experts, method, options or {}, seed=seed)
    check_merge(experts, name)
    if not hasattr(chosen, "fit"):
        raise RecipeError(f"{name!r} looks at no inputs; leave them out, or use a fitted method such as realign")
    origin = origin_of(experts, name, used, seed=seed)
    examples = _examples(experts, data, split=split, limit=limit, seed=seed)
    place = device_of(device)
    half = precision == "bfloat16" or (precision == "auto" and place.type == "cuda")
    with fixed_threads():
        setting = setting_of(
            experts,
            examples,
            device=place,
            seed=seed,
            half=half,
            how=encoding or Encoding(device=device),
            progress=progress,
        )
        if state is not None:
            run = RunState(state, _fingerprint(experts, origin, examples, split, half=half))
            setting = replace(setting, state=run, every=save_every)
        fitted: Fitted = chosen.fit(setting)
        heads, extra = _heads(setting, fitted)
    facts = {"split": split, "access": "transductive" if split == "test" else "inductive"}
    facts |= _facts(setting, fitted, examples, extra)
    seen = {task: short_hashes(some) for task, some in examples.items()}
    tensors = _tensors(experts, setting.encoder, fitted.weights, None if dtype == "keep" else DTYPE_NAMES[dtype])
    return experts.model(tensors, heads, origin.with_facts(fit=facts).with_inputs(seen))


def _examples(
    experts: Experts, data: Mapping[str, Any], *, split: Split, limit: int | None, seed: int
) -> dict[str, Examples]:
    """The unlabelled inputs of every expert, in the order of the experts."""
    missing = [task for task in experts.tasks if task not in data]
    if missing:
        task = missing[0]
        raise RecipeError(f"there are no inputs of {task!r}, and a fit needs those of all; give --data {task}=PATH")
    labels = {task: head.labels for task, head in experts.heads.items()}
    tasks = unlabelled_tasks(data, labels, experts.family.modality, split=split, limit=limit, seed=seed)
    return {task: tasks[task][split].unlabelled() for task in experts.tasks}


def _heads(setting: Setting, fitted: Fitted) -> tuple[dict[str, Head | Extra], dict[str, dict[str, int]]]:
    """The classifiers as they will be saved, and what each adds to its head."""
    heads: dict[str, Head | Extra] = dict(setting.heads)
    extra = {task: {"parameters": 0, "bytes": 0} for task in heads}
    setting.encoder.load(fitted.weights)
    for task, classifier in fitted.classifiers.items():
        if classifier is setting.heads[task]:
            continue
        rows = setting.inputs.targets[task].rows[:_SAMPLE]
        sample = encoded_rows(setting.encoder, setting.inputs, rows).cpu()
        heads[task], about = as_saved(task, Alignment(classifier), setting.heads[task], sample)
        extra[task] = about["extra"]
    return heads, extra


def _facts(
    setting: Setting, fitted: Fitted, examples: Mapping[str, Examples], extra: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    """What the manifest says of a fit."""
    return {
        "precision": "bfloat16" if setting.half else "float32",
        "device": setting.device.type,
        "facts": plain(fitted.facts),
        # Without the clock: the same fit gives the same model.
        "curve": plain([{key: value for key, value in row.items() if key != "seconds"} for row in fitted.curve]),
        "tasks": {
            task: {"inputs": len(some), "data": f"sha256:{some.digest()}", "extra": extra[task]}
            for task, some in examples.items()
        },
        "versions": versions(),
    }


def _tensors(experts: Experts, encoder: FlatEncoder, weights: torch.Tensor, dtype: str | None) -> MemoryTensors:
    """The fitted encoder in the dtype of the output; what is no parameter is the base's."""
    specs = {key: spec.cast(dtype) for key, spec in experts.specs.items()}
    tensors = encoder.tensors(weights, specs)
    for key, spec in specs.items():
        if key not in tensors:
            tensors[key] = copied_tensor(experts, key, spec).reshape(spec.shape)
    return MemoryTensors(tensors)


def _fingerprint(
    experts: Experts, origin: Origin, examples: Mapping[str, Examples], split: Split, *, half: bool
) -> str:
    """A hash of everything that the course of a fit depends on."""
    weights = [experts.base.digest, *(experts.teacher(task).digest for task in experts.tasks)]
    inputs = [some.digest() for some in examples.values()]
    made = (origin.facts["method"], origin.facts["seed"], split, half)
    parts = (VERSION, torch.__version__, _STATE, asdict(experts.opening), made, weights, inputs)
    return hashlib.sha256(repr(parts).encode()).hexdigest()
