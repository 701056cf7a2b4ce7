"""Fit new heads to a model, from features of the same inputs under its encoder and its experts' encoders."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from orthomerge.alignment.aligners import Alignment, chosen_aligner
from orthomerge.core.device import fixed_threads
from orthomerge.core.errors import IncompatibleError, NumericalError, RecipeError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.core.schema import schema
from orthomerge.core.version import VERSION
from orthomerge.data.reading import sources_of, unlabelled_tasks
from orthomerge.data.task import Split
from orthomerge.models.encoding import Encoding, encode
from orthomerge.models.experts import Experts, reopen_experts
from orthomerge.models.features import FeaturePair
from orthomerge.models.heads import Classifier, Extra, Head, head_of, rebuilt
from orthomerge.models.manifest import short_hashes
from orthomerge.models.model import Model
from orthomerge.models.saved import resolve
from orthomerge.models.writing import plain, versions

_ROWS = 256  # inputs on which rounding is measured
_MOST_GAP = 1e-5  # largest change of float32 logits by rounding, as a share of the largest logit


def align(
    model: Model | str | Path,
    data: Mapping[str, Any] | str | Path,
    *,
    aligner: str = "auto",
    options: Mapping[str, Any] | None = None,
    experts: Experts | Mapping[str, Any] | None = None,
    base: Any = None,
    split: Split = "train",
    limit: int | None = None,
    seed: int = 0,
    encoding: Encoding | None = None,
    progress: Progress = SILENT,
) -> Model:
    """Fit each task's head to the encoder from its expert's outputs on the same inputs; labels are not used.

    `data`: inputs by task, or a folder with a file per task; other tasks keep their heads. `experts`, `base`: opened
    experts, or paths if not the recorded ones. `split`: with "test", scores on these inputs are transductive. `limit`:
    most inputs per task, drawn by `seed`.
    """
    model, folder = resolve(model)
    data = sources_of(data, model.tasks)
    if split not in ("train", "val", "test"):
        raise RecipeError(f"'split' must be train, val or test, got {split!r}")
    if "alignment" in model.origin.facts:
        raise RecipeError(
            f"this model has been aligned already, by {model.origin.facts['alignment']['aligner']!r}; "
            "align the merge that it was made from"
        )
    if not model.family.encoder_class:
        raise RecipeError(
            "this model is of a module of your own, which cannot be built here; compute its features yourself, "
            "and pass them to an aligner of orthomerge.alignment.aligners"
        )
    for task in data:
        model.head(task)
    chosen = chosen_aligner(aligner, options or {}, seed=seed)
    tasks = unlabelled_tasks(data, model.labels, model.family.modality, split=split, limit=limit, seed=seed)
    if not isinstance(experts, Experts):
        experts = reopen_experts(model, folder=folder, base=base, experts=experts, tasks=tuple(data))
    inputs, encoding = {name: task[split] for name, task in tasks.items()}, encoding or Encoding()
    merged = {}
    for task, examples in inputs.items():  # merged features first, so that the merged encoder is computed once
        progress.stage(f"encoding {task}", None)
        merged[task] = encode(model, examples, task=task, how=encoding)
    heads, facts = dict(model.heads), {}
    for task, examples in inputs.items():
        progress.stage(f"aligning {task} by {aligner}", None)
        own = _own_head(model, experts, task)
        expert = encode(experts.teacher(task), examples, task=task, head=own, how=encoding)
        with fixed_threads(1):  # sums of several threads depend on their number
            alignment = chosen.fit(FeaturePair(merged[task], expert), own)
        heads[task], results = as_saved(task, alignment, head_of(model.heads[task]), merged[task].values)
        facts[task] = {"inputs": len(examples), "data": f"sha256:{examples.digest()}", **results}
    record = {
        "orthomerge": VERSION,
        "aligner": aligner,
        "seed": seed,
        "split": split,
        "limit": limit,
        "access": "transductive" if split == "test" else "inductive",
        "options": plain({option: getattr(chosen, option) for option in schema(type(chosen))}),
        "tasks": facts,
        "versions": versions(),
    }
    kept = {name: fact for name, fact in model.origin.facts.items() if name != "evaluation"}  # scores of the old heads
    notes = [
        f"no data of {task!r} was given to align it with; its head is as it was merged"
        for task in model.tasks
        if task not in inputs
    ]
    origin = replace(
        model.origin,
        facts={**kept, "notes": [*kept.get("notes", ()), *notes], "alignment": record},
        inputs={**model.origin.inputs, **{task: short_hashes(examples) for task, examples in inputs.items()}},
    )
    return model.with_heads(heads, origin)


def _own_head(model: Model, experts: Experts, task: str) -> Head:
    head, here = experts.heads[task], head_of(model.heads[task])
    default = tuple(f"LABEL_{number}" for number in range(len(head.labels)))
    if head.labels not in (here.labels, default) or len(head.labels) != len(here.labels):
        raise IncompatibleError(
            f"the expert of {task!r} has other labels than the model, or another order; "
            "give the expert that was merged, with the same 'labels'"
        )
    return replace(head, labels=here.labels)


def as_saved(task: str, alignment: Alignment, old: Head, sample: torch.Tensor) -> tuple[Head | Extra, dict[str, Any]]:
    """Cast a classifier to the dtype of `old`, and return it with its facts; `sample`: merged features [n, d]."""
    exact = _checked(task, alignment.classifier, old)
    dtype = old.output.weight.dtype
    rounded = _cast(exact, dtype)
    if _specs(head_of(rounded)) != _specs(old):
        raise IncompatibleError(
            f"the aligned head of {task!r} must have the shapes and dtypes of the head that it replaces"
        )
    narrow = dtype not in (torch.float32, torch.float64)
    gap = _gap(exact, rounded, sample[:_ROWS].double())
    if not narrow and not gap <= _MOST_GAP:
        raise NumericalError(
            f"the logits of {task!r} change by {gap:.1e} of the largest when they are rounded to "
            f"{str(dtype).removeprefix('torch.')}; use another aligner, or experts in float32"
        )
    tensors = {} if isinstance(rounded, Head) else rounded.extra_tensors()
    return rounded, {
        "facts": plain({**alignment.facts, **({"rounding": gap} if narrow else {})}),
        "extra": {
            "parameters": sum(tensor.numel() for tensor in tensors.values()),
            "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        },
    }


def _cast(classifier: Head | Extra, dtype: torch.dtype) -> Head | Extra:
    head = head_of(classifier).to("cpu", dtype)
    if isinstance(classifier, Head):
        return head
    tensors = {name: tensor.detach().to("cpu", dtype) for name, tensor in classifier.extra_tensors().items()}
    return rebuilt(classifier.kind, head, tensors, where=Path(classifier.kind))


def _checked(task: str, classifier: Classifier, old: Head) -> Head | Extra:
    if classifier.labels != old.labels:
        raise IncompatibleError(f"the aligned classifier of {task!r} has other labels than the head it replaces")
    if isinstance(classifier, Head):
        return classifier.reading_as(old)
    if not hasattr(classifier, "extra_tensors"):
        raise RecipeError(
            f"the classifier of {task!r} is a {type(classifier).__name__}, which cannot be saved; an aligner must "
            "return a Head, or a head behind a module that has 'extra_tensors'"
        )
    extra = cast("Extra", classifier)
    return rebuilt(extra.kind, extra.head.reading_as(old), extra.extra_tensors(), where=Path(extra.kind))


def _specs(head: Head) -> dict[str, tuple[Any, ...]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in head.tensors().items()}


def _gap(one: Head | Extra, other: Head | Extra, sample: torch.Tensor) -> float:
    """Largest difference between logits in float64, as a share of the largest logit."""
    logits, rounded = (_cast(classifier, torch.float64)(sample) for classifier in (one, other))
    largest = logits.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    return float((logits - rounded).abs().max() / largest)
