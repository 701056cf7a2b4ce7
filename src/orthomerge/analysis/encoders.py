"""Encoders of output folders: CKA between those that are loaded for it, and task vectors between their weights.

Every expert is loaded once and let go again; inputs are some of each task's test inputs, drawn from the seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from orthomerge.analysis.cka import LEAST, cka_matrix, layer_figure, linear_cka, pair_figure
from orthomerge.analysis.embedding import chosen_inputs
from orthomerge.analysis.layers import layer_states
from orthomerge.checkpoints.checkpoint import is_float
from orthomerge.checkpoints.opening import open_checkpoint
from orthomerge.data.inputs import pick
from orthomerge.data.task import Examples
from orthomerge.merged import Merged, load
from orthomerge.merging.vectors import Difference, TaskVector, TaskVectors
from orthomerge.models.weights import EncoderWeights

if TYPE_CHECKING:
    from orthomerge.analysis.figures import Heat
    from orthomerge.evaluation.bench import Bench
    from orthomerge.evaluation.evaluate import Subject

__all__ = ["cka_figures", "encoder_vectors", "encoder_weights"]

_ALL = "all tasks"  # inputs of every task together


def cka_figures(
    bench: Bench, subject: Subject, tasks: Sequence[str], *, most: int, seed: int, left_out: dict[str, str]
) -> tuple[Heat, ...]:
    """Layers by task, and encoders by encoder. `most`: inputs; `left_out` is told what could not be measured."""
    own = {task: _some(bench, task, most, seed) for task in tasks}
    few = [task for task, examples in own.items() if len(examples) < LEAST]
    if few:
        left_out["CKA"] = f"{few[0]!r} has fewer than {LEAST} test inputs"
        return ()
    mixed = _mixed(bench, tasks, most, seed)
    merged = {path: load(path) for path in dict.fromkeys(subject.models[task] for task in tasks)}
    by_layer: dict[str, dict[str, float]] = {}
    views: dict[str, torch.Tensor] = {}
    pooling = ""
    for task in tasks:
        expert = load(bench.teacher_of(task))
        pooling = expert.pooling
        theirs = _states(bench, expert, own[task], task)
        ours = _states(bench, merged[subject.models[task]], own[task], task)
        by_layer[task] = {name: linear_cka(ours[name], theirs[name], unbiased=True) for name in theirs if name in ours}
        views[task] = bench.encode(expert, _ALL, mixed).values
    if len(merged) == 1:
        views[subject.name if subject.name not in views else f"{subject.name} (merged)"] = bench.encode(
            next(iter(merged.values())), _ALL, mixed
        ).values
    figures = [layer_figure(by_layer, inputs=most, pooling=pooling)]
    if len(views) > 1:
        figures.append(pair_figure(tuple(views), cka_matrix(list(views.values())), inputs=len(mixed)))
    return tuple(figures)


def encoder_vectors(base: Path, experts: Mapping[str, Path]) -> TaskVectors:
    """The task vectors of output folders: each expert's encoder minus the base's, lazy."""
    weights = encoder_weights(base)
    tuned = {task: encoder_weights(expert) for task, expert in experts.items()}
    names = {key: key for key in weights.keys() if any(key in each.names for each in tuned.values())}
    shared = EncoderWeights(weights.checkpoint, names)
    return TaskVectors(
        {
            task: TaskVector(shared, ((1.0, Difference(each, frozenset(set(names) - set(each.names)))),))
            for task, each in tuned.items()
        }
    )


def encoder_weights(folder: Path) -> EncoderWeights:
    """The floating-point weights of an output's encoder, unread."""
    checkpoint = open_checkpoint(folder / "encoder")
    return EncoderWeights(checkpoint, {key: key for key in checkpoint if is_float(checkpoint.spec(key).dtype)})


def _states(bench: Bench, model: Merged, examples: Examples, task: str) -> dict[str, torch.Tensor]:
    return layer_states(
        model,
        examples,
        bench.processor,
        task=task,
        batch=bench.batch,
        device=bench.device,
        autocast=bench.autocast,
    )


def _some(bench: Bench, task: str, most: int, seed: int) -> Examples:
    examples = bench.tasks[task]["test"]
    places = chosen_inputs(examples.labels, len(examples), most=most, seed=seed)
    return Examples(pick(examples.inputs, places), None, "test")


def _mixed(bench: Bench, tasks: Sequence[str], most: int, seed: int) -> Examples:
    """As many of every task."""
    each = min(-(-most // len(tasks)), *(len(bench.tasks[task]["test"]) for task in tasks))
    inputs = [item for task in tasks for item in _some(bench, task, each, seed).inputs]
    return Examples(inputs, None, "test")
