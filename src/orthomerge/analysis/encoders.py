"""CKA between a model and its experts, layer by layer, on some test inputs of each task drawn from the seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from orthomerge.analysis.cka import LEAST, cka_matrix, layer_figure, linear_cka, pair_figure
from orthomerge.analysis.embedding import chosen_inputs
from orthomerge.analysis.layers import layer_states
from orthomerge.data.task import Examples, Task, pick
from orthomerge.models.encoding import Encoding, encode
from orthomerge.models.heads import head_of

if TYPE_CHECKING:
    from orthomerge.analysis.figures import Heat
    from orthomerge.models.model import Model


_ALL = "all tasks"  # inputs of every task together


@dataclass(frozen=True)
class Samples:
    """Test inputs of each task, and as many of every task together. `most`: how many were asked for."""

    own: Mapping[str, Examples]
    mixed: Examples
    most: int


def draw_samples(tasks: Mapping[str, Task], *, most: int, seed: int) -> Samples | str:
    """Some test inputs; or why there are too few, in words."""
    own = {task: _some(each, most, seed) for task, each in tasks.items()}
    for task, examples in own.items():
        if len(examples) < LEAST:
            return f"{task!r} has fewer than {LEAST} test inputs"
    share = min(-(-most // len(tasks)), *(len(task["test"]) for task in tasks.values()))
    inputs = [item for task in tasks.values() for item in _some(task, share, seed).inputs]
    return Samples(own, Examples(inputs, None, "test"), most)


@dataclass(frozen=True, eq=False)
class LayerComparison:
    """How alike a model and its experts are. `states`: of the model, by task and layer. `mixed` and `views`:
    features of the mixed inputs, by the model and by each expert.
    """

    samples: Samples
    states: Mapping[str, Mapping[str, torch.Tensor]]
    mixed: Mapping[str, torch.Tensor]
    poolings: Mapping[str, None]
    how: Encoding
    by_layer: dict[str, dict[str, float]] = field(default_factory=dict)
    views: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Model, samples: Samples, *, how: Encoding) -> LayerComparison:
        """Run the model; experts are added one by one."""
        how = replace(how, cache=None)
        states = {task: _states(model, examples, task, how) for task, examples in samples.own.items()}
        mixed, heads = dict[str, torch.Tensor](), {task: head_of(model.head(task)) for task in samples.own}
        # Features depend on how a head reads the encoder, and experts may differ in that.
        readers = {(head.pooling, head.max_length): task for task, head in reversed(heads.items())}
        for task in heads:
            if task in readers.values():
                name = model.title if len(readers) == 1 else f"{model.title} as {task}"
                name = f"{name} (merged)" if name in heads else name
                mixed[name] = _features(model, samples.mixed, task, how)
        poolings = dict.fromkeys(head.pooling or model.family.default_pooling for head in heads.values())
        return cls(samples, states, mixed, poolings, how)

    def add(self, task: str, expert: Model) -> None:
        """Run an expert on the inputs of its task and on the mixed ones."""
        theirs, ours = _states(expert, self.samples.own[task], task, self.how), self.states[task]
        self.by_layer[task] = {
            name: linear_cka(ours[name], theirs[name], unbiased=True) for name in theirs if name in ours
        }
        self.views[task] = _features(expert, self.samples.mixed, task, self.how)

    def figures(self) -> tuple[Heat, ...]:
        """Layers by task, and encoders by encoder."""
        pooling = ", ".join(self.poolings)
        layers = layer_figure(self.by_layer, inputs=self.samples.most, pooling=pooling)
        views = {**self.views, **self.mixed}
        pairs = pair_figure(tuple(views), cka_matrix(list(views.values())), inputs=len(self.samples.mixed))
        return layers, pairs


def _states(model: Model, examples: Examples, task: str, how: Encoding) -> dict[str, torch.Tensor]:
    head = head_of(model.head(task))
    pooling = head.pooling or model.family.default_pooling
    encoder, family = model.encoder.runner(pooling)
    return layer_states(
        encoder,
        family,
        pooling,
        examples,
        how.processor or model.processor.processor(head.max_length),
        task=task,
        batch=how.batch,
        device=how.device,
        autocast=how.precision,
    )


def _features(model: Model, examples: Examples, task: str, how: Encoding) -> torch.Tensor:
    return encode(model, examples, task=_ALL, head=head_of(model.head(task)), how=how).values


def _some(task: Task, most: int, seed: int) -> Examples:
    examples = task["test"]
    places = chosen_inputs(examples.labels, len(examples), most=most, seed=seed)
    return Examples(pick(examples.inputs, places), None, "test")
