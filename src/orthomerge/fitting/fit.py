"""Fit a merge of opened experts to unlabelled inputs."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from orthomerge.alignment.align import as_saved
from orthomerge.alignment.aligners import Alignment
from orthomerge.core.device import device_of, fixed_threads
from orthomerge.core.errors import RecipeError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.core.version import VERSION
from orthomerge.data.reading import unlabelled_tasks
from orthomerge.data.task import Examples, Split
from orthomerge.files.run_state import RunState
from orthomerge.fitting.layout import FlatEncoder
from orthomerge.fitting.setting import Fitted, Setting, encoded_rows, prepare
from orthomerge.merging.merge import DTYPE_NAMES, MergedTensors, check_merge, chosen_method, copied_tensor, origin_of
from orthomerge.models.encoding import Encoding, encode
from orthomerge.models.experts import Experts
from orthomerge.models.heads import Extra, Head
from orthomerge.models.manifest import short_hashes
from orthomerge.models.model import Model
from orthomerge.models.model_data import Origin, release
from orthomerge.models.skeleton import Skeleton
from orthomerge.models.tensors import MemoryTensors
from orthomerge.models.writing import plain, versions

_SAMPLE = 256  # inputs on which the rounding of a head is measured
_STATE = 5  # version of the state on disk; other versions are ignored
_BETWEEN = 60.0  # seconds between two states on disk


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
    """Fit a merge to unlabelled inputs of every expert and return it as a model.

    `method`: a fitted method's name with its `options`, or an object. `split`: with "test", scores on these inputs are
    transductive. `limit`: most inputs per task, drawn by `seed`. `precision`: of training; auto is bfloat16 on a GPU.
    `state`: the folder from which a killed run continues, written every `save_every` seconds and never removed here.
    """
    name, chosen, used = chosen_method(experts, method, options or {}, seed=seed)
    check_merge(experts, name)
    if not hasattr(chosen, "fit"):
        raise RecipeError(f"{name!r} uses no inputs; leave them out, or use a fitted method such as realign")
    for task in experts.tasks:
        if task not in data:
            raise RecipeError(f"a fit needs inputs of every task, got none of {task!r}; give --data {task}=PATH")
    labels = {task: head.labels for task, head in experts.heads.items()}
    tasks = unlabelled_tasks(data, labels, experts.family.modality, split=split, limit=limit, seed=seed)
    examples = {task: tasks[task][split].unlabelled() for task in experts.tasks}
    place = device_of(device)
    half = precision == "bfloat16" or (precision == "auto" and place.type == "cuda")
    origin, how = origin_of(experts, name, used, seed=seed), encoding or Encoding(device=device)
    with fixed_threads():
        setting = setting_of(experts, examples, place, seed=seed, half=half, how=how, progress=progress)
        if state is not None:
            setting = replace(
                setting,
                state=RunState(state, _fingerprint(experts, examples, origin, split, setting.half)),
                every=_BETWEEN if save_every is None else save_every,
            )
        fitted = chosen.fit(setting)
        heads, extra = _heads(setting, fitted)
        facts = {
            "split": split,
            "access": "transductive" if split == "test" else "inductive",
            "precision": "bfloat16" if half else "float32",
            "device": place.type,
            "facts": plain(fitted.facts),
            # Without times, so that the same fit gives the same model.
            "curve": plain([{key: value for key, value in row.items() if key != "seconds"} for row in fitted.curve]),
            "tasks": {
                task: {"inputs": len(some), "data": f"sha256:{some.digest()}", "extra": extra[task]}
                for task, some in examples.items()
            },
            "versions": versions(),
        }
        hashes = {task: short_hashes(some) for task, some in examples.items()}
        tensors = _tensors(experts, setting.encoder, fitted.weights, None if dtype == "keep" else DTYPE_NAMES[dtype])
    origin = replace(origin, facts={**origin.facts, "fit": facts}, inputs={**origin.inputs, **hashes})
    return experts.model(tensors, heads, origin)


def setting_of(
    experts: Experts,
    examples: Mapping[str, Examples],
    device: torch.device,
    *,
    how: Encoding,
    seed: int = 0,
    half: bool = False,
    progress: Progress = SILENT,
) -> Setting:
    """Build the setting of a fit in which every task has its own inputs; `how`: encoding of the experts."""
    pooling, teacher = _pooling(experts), {}
    for task, some in examples.items():
        progress.stage(f"encoding {task}", None)
        model = experts.teacher(task)
        teacher[task] = encode(model, some, task=task, how=how).values
        release(model.encoder)
    specs = {key: spec.cast("F32") for key, spec in experts.base.weights.specs.items()}
    skeleton = Skeleton.build(experts.family, experts.config, specs)
    encoder = FlatEncoder(skeleton.module, partial(experts.family.features, pooling=pooling), device, skeleton.names)
    progress.stage("preparing the inputs", None)
    processors = {
        task: how.processor or experts.processor.processor(head.max_length) for task, head in experts.heads.items()
    }

    def merged(method: str, options: Mapping[str, Any]) -> torch.Tensor:
        name, chosen, _ = chosen_method(experts, method, options, seed=seed)
        if hasattr(chosen, "fit"):
            raise RecipeError(f"a fit starts from a merge without inputs, and {name!r} needs some; use task_arithmetic")
        return encoder.flat(MergedTensors(experts, chosen, "float32"))

    return Setting(
        encoder,
        encoder.flat(experts.base.weights),
        tuned=lambda task: encoder.flat(experts.teacher(task).weights),
        merged=merged,
        heads=experts.heads,
        inputs=prepare(examples, processors, teacher, device=device),
        seed=seed,
        half=half,
        say=lambda text: progress.stage(text, None),
    )


def _pooling(experts: Experts) -> str:
    poolings = {task: head.pooling or experts.family.default_pooling for task, head in experts.heads.items()}
    (first, pooling), *rest = poolings.items()
    for task, other in rest:
        if other != pooling:
            raise RecipeError(
                f"the heads of {first!r} and {task!r} read the encoder in two ways ({pooling} and {other}), and a fit "
                "needs one; give it for all as 'pooling', or leave out the experts that differ"
            )
    return pooling


def _heads(setting: Setting, fitted: Fitted) -> tuple[dict[str, Head | Extra], dict[str, dict[str, int]]]:
    heads: dict[str, Head | Extra] = dict(setting.heads)
    extra = {task: {"parameters": 0, "bytes": 0} for task in heads}
    setting.encoder.load(fitted.weights)
    for task, classifier in fitted.classifiers.items():
        if classifier is setting.heads[task]:
            continue
        sample = encoded_rows(setting.encoder, setting.inputs.pool, setting.inputs.targets[task].rows[:_SAMPLE]).cpu()
        heads[task], record = as_saved(task, Alignment(classifier), setting.heads[task], sample)
        extra[task] = record["extra"]
    return heads, extra


def _tensors(experts: Experts, encoder: FlatEncoder, weights: torch.Tensor, dtype: str | None) -> MemoryTensors:
    specs = {key: spec.cast(dtype) for key, spec in experts.specs.items()}
    tensors = encoder.tensors(weights, specs)
    for key, spec in specs.items():
        if key not in tensors:
            tensors[key] = copied_tensor(experts, key, spec).reshape(spec.shape)
    return MemoryTensors(tensors)


def _fingerprint(experts: Experts, examples: Mapping[str, Examples], origin: Origin, *run: object) -> str:
    """Hash everything that the result of a fit depends on; `run`: split and precision."""
    weights = [experts.base.digest, *(experts.teacher(task).digest for task in experts.tasks)]
    inputs = [some.digest() for some in examples.values()]
    versions = (VERSION, torch.__version__, _STATE)
    parts = (versions, asdict(experts.opening), origin.facts["method"], origin.facts["seed"], run, weights, inputs)
    return hashlib.sha256(repr(parts).encode()).hexdigest()
