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
from typing import TYPE_CHECKING, Any

import torch

from orthomerge.analysis.cka import LEAST, cka_matrix, linear_cka
from orthomerge.analysis.figures import Heat
from orthomerge.analysis.looks import sample
from orthomerge.data.task import Examples
from orthomerge.models.encoding import Encoding, encode
from orthomerge.models.extract import extract
from orthomerge.models.heads import head_of
from orthomerge.models.pooling import cls

if TYPE_CHECKING:
    from orthomerge.data.task import Task
    from orthomerge.models.family import Encoder, Family, Forward, Pooling
    from orthomerge.models.model import Model
    from orthomerge.models.processing import Processor

FEATURES = "features"  # what the head reads
_ALL = "all tasks"  # inputs of every task together
_BEHIND = ("pooler", "projection")
_NAME = "every layer"

States = dict[str, torch.Tensor]  # [n, d] by layer, in float32


@dataclass(frozen=True)
class Samples:
    """Test inputs of each task, and equally many of every task together. `most`: how many were asked for."""

    own: Mapping[str, Examples]
    mixed: Examples
    most: int

    @classmethod
    def of(cls, tasks: Mapping[str, Task], *, most: int, seed: int) -> Samples | str:
        """Draw the inputs; a text says why there are too few."""
        own = {name: sample(task["test"], most=most, seed=seed) for name, task in tasks.items()}
        for name, examples in own.items():
            if len(examples) < LEAST:
                return f"{name!r} has fewer than {LEAST} test inputs"
        share = min(-(-most // len(tasks)), *(len(task["test"]) for task in tasks.values()))
        inputs = [item for task in tasks.values() for item in sample(task["test"], most=share, seed=seed).inputs]
        return cls(own, Examples(inputs, None, "test"), most)


@dataclass(frozen=True, eq=False)
class LayerComparison:
    """States of the model by task, features of the mixed inputs by encoder, and CKA by task and layer."""

    samples: Samples
    states: Mapping[str, States]
    mixed: Mapping[str, torch.Tensor]
    poolings: tuple[str, ...]
    how: Encoding
    by_layer: dict[str, dict[str, float]] = field(default_factory=dict)
    experts: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Model, samples: Samples, *, how: Encoding) -> LayerComparison:
        """Run the model; experts are added one by one."""
        how = replace(how, cache=None)
        states = {task: _states(model, examples, task, how) for task, examples in samples.own.items()}
        heads = {task: head_of(model.head(task)) for task in samples.own}
        # Features depend on how a head reads the encoder, and experts may differ in that: one view per way of reading.
        tasks = {(head.pooling, head.max_length): task for task, head in reversed(heads.items())}
        mixed = {}
        for task in heads:
            if task in tasks.values():
                name = model.title if len(tasks) == 1 else f"{model.title} as {task}"
                mixed[f"{name} (merged)" if name in heads else name] = _features(model, samples.mixed, task, how)
        poolings = dict.fromkeys(head.pooling or model.family.default_pooling for head in heads.values())
        return cls(samples, states, mixed, tuple(poolings), how)

    def add(self, task: str, expert: Model) -> None:
        """Run an expert on the inputs of its task and on the mixed ones."""
        theirs, ours = _states(expert, self.samples.own[task], task, self.how), self.states[task]
        self.by_layer[task] = {
            name: linear_cka(ours[name], theirs[name], unbiased=True) for name in theirs if name in ours
        }
        self.experts[task] = _features(expert, self.samples.mixed, task, self.how)

    def figures(self) -> tuple[Heat, ...]:
        """Layers by task, and encoders by encoder."""
        views = {**self.experts, **self.mixed}
        layers = tuple(next(iter(self.by_layer.values())))
        return (
            Heat(
                "cka-layers",
                "Merged and expert, layer by layer",
                f"Linear CKA (unbiased) of hidden states on at most {self.samples.most} test inputs of the task, read "
                f"as the pooling {', '.join(self.poolings)!r} reads the last ones. 1: equal up to a rotation and a "
                "scale. Missing: the layer says the same of every input there.",
                layers,
                tuple(self.by_layer),
                tuple(tuple(values.get(layer, math.nan) for values in self.by_layer.values()) for layer in layers),
                "CKA",
            ),
            Heat(
                "cka-experts",
                "How alike the encoders see things",
                f"Linear CKA (unbiased) between features of the same {len(self.samples.mixed)} test inputs, as many of "
                "every task. Inputs of several tasks fall apart into tasks, which all encoders see: this alone makes "
                "for a high CKA.",
                tuple(views),
                tuple(views),
                cka_matrix(list(views.values())),
                "CKA",
            ),
        )


def _features(model: Model, examples: Examples, task: str, how: Encoding) -> torch.Tensor:
    return encode(model, examples, task=_ALL, head=head_of(model.head(task)), how=how).values


def _states(model: Model, examples: Examples, task: str, how: Encoding) -> States:
    head = head_of(model.head(task))
    pooling = head.pooling or model.family.default_pooling
    encoder, family = model.encoder.runner(pooling)
    processor = how.processor or model.processor.processor(head.max_length)
    return layer_states(encoder, family, pooling, examples, processor, task=task, how=how)


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
    options: dict[str, Any] = {"batch": how.batch, "device": how.device, "autocast": how.precision}
    values = extract(encoder, layered, _NAME, examples, processor, task=task, **options).values
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
