"""Linear CKA between a model and its experts, layer by layer, and between all encoders.

CKA is a similarity of features, invariant to rotation, shift and common scale. Kornblith et al. 2019, arXiv 1905.00414;
without bias: Song et al. 2012 (HSIC_1), Nguyen et al. 2021, arXiv 2010.15327.

    CKA(X, Y) = HSIC(X, Y) / sqrt(HSIC(X, X) HSIC(Y, Y))

The biased CKA of any features is near 1 if inputs are fewer than features. The unbiased HSIC is, up to a factor, with
K = X X^T and L = Y Y^T whose diagonals are set to zero,

    tr(K L) + (1'K1)(1'L1) / ((n-1)(n-2)) - 2 1'K L 1 / (n-2).

It may be a little below 0; NaN where features are constant. Letters: X [n, p], Y [n, q], one row per input.

Hidden states come from `output_hidden_states` of transformers: the embeddings, then every layer, each pooled like the
last one. `pooler` and `projection` follow the last layer: hidden states are then pooled by their first token.
For T5 classifiers they are the decoder's. If an encoder returns no hidden states, only its features are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from orthomerge.analysis.detail import Detail, sample
from orthomerge.analysis.diagnosis import Heat
from orthomerge.data.task import Examples, Task
from orthomerge.models.encoding import Encoding, encode, extract
from orthomerge.models.family import Family, Forward, Network, Pooling, cls
from orthomerge.models.heads import Head, head_of
from orthomerge.models.model import Model
from orthomerge.models.processing import Processor

FEWEST_FOR_CKA = 4  # inputs that the unbiased estimate needs
_FLAT = 1e-12  # share of the sum of squares below which variation is rounding
_AFTER_LAYERS = ("pooler", "projection")
_NAME = "every layer"

States = dict[str, torch.Tensor]  # [n, d] by layer, in float32


def linear_cka(X: torch.Tensor, Y: torch.Tensor) -> float:
    """Return the unbiased CKA of two sets of features of the same inputs, at least `FEWEST_FOR_CKA`."""
    X, Y = _centred(X.double()), _centred(Y.double())
    sizes = _hsic(X, X) * _hsic(Y, Y)
    return _hsic(X, Y) / math.sqrt(sizes) if sizes > 0 else math.nan


def _centred(X: torch.Tensor) -> torch.Tensor:
    """Subtract the means of X and scale it to norm 1; NaN if it is constant."""
    centred = X - X.mean(0)
    variation = float(centred.square().sum())
    return centred / (math.sqrt(variation) if variation > _FLAT * float(X.square().sum()) else math.nan)


def _hsic(X: torch.Tensor, Y: torch.Tensor) -> float:
    n, K, L = len(X), X @ X.T, Y @ Y.T
    K.fill_diagonal_(0)
    L.fill_diagonal_(0)
    k, m = K.sum(1), L.sum(1)
    sums = k.sum() * m.sum() / ((n - 1) * (n - 2))
    return float((K * L).sum() + sums - 2 * (k @ m) / (n - 2))


def layer_figures(
    model: Model, experts: Mapping[str, Model], tasks: Mapping[str, Task], *, detail: Detail, how: Encoding
) -> tuple[Heat, ...]:
    """Measure CKA of model and experts by layer, and between all encoders."""
    samples = {name: sample(task["test"], most=detail.layers, seed=detail.seed) for name, task in tasks.items()}
    share = min(-(-detail.layers // len(tasks)), *(len(task["test"]) for task in tasks.values()))
    parts = [sample(task["test"], most=share, seed=detail.seed) for task in tasks.values()]
    mixed = Examples([item for part in parts for item in part.inputs], None, "test")
    how = replace(how, cache=None)

    def states(encoded: Model, task: str) -> States:
        head = head_of(encoded.head(task))
        pooling = head.pooling or encoded.family.default_pooling
        encoder, family = encoded.encoder.runner(pooling)
        processor = how.processor or encoded.processor.processor(head.max_length)
        return layer_states(encoder, family, pooling, samples[task], processor, task=task, how=how)

    def features(encoded: Model, head: Head) -> torch.Tensor:
        return encode(encoded, mixed, task="all tasks", head=head, how=how).values

    # Encode the model first, so that a lazy merge is computed once.
    heads = [head_of(model.head(task)) for task in tasks]
    merged_states = {task: states(model, task) for task in tasks}
    merged_features = features(model, heads[0])
    by_layer, encoders = {}, {}
    for task, expert in experts.items():
        own, merged = states(expert, task), merged_states[task]
        by_layer[task] = {name: linear_cka(merged[name], state) for name, state in own.items() if name in merged}
        encoders[task] = features(expert, head_of(expert.head(task)))
    encoders[model.title if model.title not in encoders else f"{model.title} (merged)"] = merged_features
    poolings = ", ".join(dict.fromkeys(head.pooling or model.family.default_pooling for head in heads))
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
            tuple(encoders),
            tuple(encoders),
            tuple(tuple(linear_cka(X, Y) for Y in encoders.values()) for X in encoders.values()),
            "CKA",
        ),
    )


def layer_states(
    encoder: torch.nn.Module,
    family: Family,
    pooling: str,
    examples: Examples,
    processor: Processor,
    *,
    task: str,
    how: Encoding,
) -> States:
    """Encode examples; return states of `embeddings`, `layer 0`, `layer 1`, ..., and the `features` for the head."""
    inner = cls if pooling in _AFTER_LAYERS else family.poolings[pooling]
    reader = _Reader(family.poolings[pooling], inner)
    layered = replace(family, forward=partial(_with_states, family.forward), poolings={_NAME: reader})
    values = extract(encoder, layered, _NAME, examples, processor, task=task, how=how).values
    *parts, features = torch.split(values, reader.widths, dim=1)
    names = ["embeddings", *(f"layer {number}" for number in range(len(parts) - 1))]
    return {**dict(zip(names, parts, strict=False)), "features": features}


@dataclass(frozen=True)
class _Reader:
    """A pooling that concatenates the states of all layers, [B, sum of widths]; `inner` pools one state."""

    outer: Pooling
    inner: Pooling
    widths: list[int] = field(default_factory=list)

    def __call__(self, output: Any, batch: Mapping[str, torch.Tensor], config: Any) -> torch.Tensor:
        states = getattr(output, "decoder_hidden_states", None) or getattr(output, "hidden_states", None) or ()
        parts = [self.inner(SimpleNamespace(last_hidden_state=state), batch, config).float() for state in states]
        parts.append(self.outer(output, batch, config).float())
        self.widths[:] = [part.shape[1] for part in parts]
        return torch.cat(parts, 1)


def _with_states(forward: Forward, encoder: Network, batch: Mapping[str, Any]) -> Any:
    """Run an encoder with the hidden states of all layers; a custom module without config returns its output only."""
    options: dict[str, Any] = {} if getattr(encoder, "config", None) is None else {"output_hidden_states": True}
    return forward(encoder, {**batch, **options})
