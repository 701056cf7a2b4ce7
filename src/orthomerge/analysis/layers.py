"""CKA between a model and its experts, layer by layer, on test inputs that are drawn with the seed.

Hidden states come from `output_hidden_states` of transformers: the embeddings, then every layer, each read as the
pooling reads the last one. `pooler` and `projection` follow the last layer; before it the first token stands for them.
T5 as a classifier is read in its decoder. An encoder that returns no hidden states has its features only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from orthomerge.analysis.cka import LEAST, cka_matrix, linear_cka
from orthomerge.analysis.detail import Detail, sample
from orthomerge.analysis.figures import Heat
from orthomerge.data.task import Examples, Task
from orthomerge.models.encoding import Encoding, encode, extract
from orthomerge.models.family import Encoder, Family, Forward, Pooling, cls
from orthomerge.models.heads import Head, head_of
from orthomerge.models.model import Model
from orthomerge.models.processing import Processor

FEATURES = "features"  # what the head reads
_BEHIND = ("pooler", "projection")
_NAME = "every layer"

States = dict[str, torch.Tensor]  # [n, d] by layer, in float32


def layer_figures(
    model: Model, experts: Mapping[str, Model], tasks: Mapping[str, Task], *, detail: Detail, how: Encoding
) -> tuple[Heat, ...] | str:
    """CKA of the model and its experts by layer, and of all encoders; a text says why there are too few inputs."""
    own = {name: sample(task["test"], most=detail.layers, seed=detail.seed) for name, task in tasks.items()}
    for name, examples in own.items():
        if len(examples) < LEAST:
            return f"{name!r} has fewer than {LEAST} test inputs"
    share = min(-(-detail.layers // len(tasks)), *(len(task["test"]) for task in tasks.values()))
    parts = [sample(task["test"], most=share, seed=detail.seed) for task in tasks.values()]
    mixed = Examples([item for part in parts for item in part.inputs], None, "test")
    how = replace(how, cache=None)

    def states(encoded: Model, task: str) -> States:
        head = head_of(encoded.head(task))
        pooling = head.pooling or encoded.family.default_pooling
        encoder, family = encoded.encoder.runner(pooling)
        processor = how.processor or encoded.processor.processor(head.max_length)
        return layer_states(encoder, family, pooling, own[task], processor, task=task, how=how)

    def features(encoded: Model, head: Head) -> torch.Tensor:
        return encode(encoded, mixed, task="all tasks", head=head, how=how).values

    # The model first, so that its encoder is computed once.
    heads = {task: head_of(model.head(task)) for task in tasks}
    ours = {task: states(model, task) for task in tasks}
    merged = {name: features(model, head) for name, head in _readers(model, heads).items()}
    by_layer, views = {}, {}
    for task, expert in experts.items():
        theirs = states(expert, task)
        by_layer[task] = {name: linear_cka(ours[task][name], theirs[name]) for name in theirs if name in ours[task]}
        views[task] = features(expert, head_of(expert.head(task)))
    views |= merged
    poolings = ", ".join(dict.fromkeys(head.pooling or model.family.default_pooling for head in heads.values()))
    layers = tuple(next(iter(by_layer.values())))
    return (
        Heat(
            "cka-layers",
            "Merged and expert, layer by layer",
            f"Linear CKA (unbiased) of hidden states on at most {detail.layers} test inputs of the task, read as the "
            f"pooling {poolings!r} reads the last ones. 1: equal up to a rotation and a scale. Missing: the layer says "
            "the same of every input there.",
            layers,
            tuple(by_layer),
            tuple(tuple(values.get(layer, math.nan) for values in by_layer.values()) for layer in layers),
            "CKA",
        ),
        Heat(
            "cka-experts",
            "How alike the encoders see things",
            f"Linear CKA (unbiased) between features of the same {len(mixed)} test inputs, as many of every task. "
            "Inputs of several tasks fall apart into tasks, which all encoders see: this alone makes for a high CKA.",
            tuple(views),
            tuple(views),
            cka_matrix(list(views.values())),
            "CKA",
        ),
    )


def _readers(model: Model, heads: Mapping[str, Head]) -> dict[str, Head]:
    """One head for each way in which the heads of a model read the encoder, by what a figure calls it."""
    ways: dict[tuple[str | None, int | None], str] = {}
    for task, head in heads.items():
        ways.setdefault((head.pooling, head.max_length), task)
    readers = {}
    for task in ways.values():
        name = model.title if len(ways) == 1 else f"{model.title} as {task}"
        readers[f"{name} (merged)" if name in heads else name] = heads[task]
    return readers


def layer_states(
    encoder: Encoder,
    family: Family,
    pooling: str,
    examples: Examples,
    processor: Processor,
    *,
    task: str,
    how: Encoding,
) -> States:
    """By name: `embeddings`, `layer 0` and each after it, and `features`: what the head reads."""
    reader = _Reader(family.poolings[pooling], cls if pooling in _BEHIND else family.poolings[pooling])
    layered = replace(family, forward=partial(_with_states, family.forward), poolings={_NAME: reader})
    values = extract(encoder, layered, _NAME, examples, processor, task=task, how=how).values
    *parts, features = torch.split(values, reader.widths, dim=1)
    names = ["embeddings", *(f"layer {number}" for number in range(len(parts) - 1))]
    return {**dict(zip(names, parts, strict=False)), FEATURES: features}


@dataclass(frozen=True)
class _Reader:
    """A pooling that puts all layers' states side by side, [B, sum of widths]; `inner` reads the states of one."""

    outer: Pooling
    inner: Pooling
    widths: list[int] = field(default_factory=list)

    def __call__(self, output: Any, batch: Mapping[str, torch.Tensor], config: Any) -> torch.Tensor:
        states = getattr(output, "decoder_hidden_states", None) or getattr(output, "hidden_states", None) or ()
        parts = [self.inner(SimpleNamespace(last_hidden_state=state), batch, config).float() for state in states]
        parts.append(self.outer(output, batch, config).float())
        self.widths[:] = [part.shape[1] for part in parts]
        return torch.cat(parts, 1)


def _with_states(forward: Forward, encoder: Encoder, batch: Mapping[str, Any]) -> Any:
    """Run an encoder with the hidden states of all layers; a custom module without config has its output alone."""
    options: dict[str, Any] = {} if getattr(encoder, "config", None) is None else {"output_hidden_states": True}
    return forward(encoder, {**batch, **options})
