"""CKA of the updates of full and of LoRA experts, layer by layer, on what the base's own layers are given."""

from __future__ import annotations

from typing import Any

import torch

from orthomerge.analysis.cka import update_cka
from orthomerge.merging.merged import task_vectors
from orthomerge.merging.vectors import TaskVectors
from orthomerge.suites.suite import Suite

KINDS = ("full", "LoRA", "LoRA, KnOTS, V alone", "full, KnOTS, V alone")
_INPUTS = 512  # of a layer: tokens of inputs of all tasks


def measure(full: Suite, lora: Suite) -> dict[str, dict[str, float]]:
    """CKA by kind and adapted layer."""
    whole, thin = _vectors(full), _vectors(lora)
    adapted = _adapted(thin)
    inputs = _inputs(full, {key: thin.base.read(key, 0, torch.Size(thin.shapes[key]).numel()) for key in adapted})
    found: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    for key in adapted:
        updates = {name: _updates(each, key) for name, each in (("full", whole), ("LoRA", thin))}
        for name, values in updates.items():
            found[name][key] = update_cka(values, inputs=inputs[key])
            found[f"{name}, KnOTS, V alone"][key] = update_cka(values, inputs=inputs[key], view="directions")
    return found


def adapted_share(lora: Suite) -> float:
    """The share of the encoder's weights that the adapters change."""
    thin = _vectors(lora)
    sizes = {key: torch.Size(shape).numel() for key, shape in thin.shapes.items()}
    return sum(sizes[key] for key in _adapted(thin)) / sum(sizes.values())


def _adapted(thin: TaskVectors) -> list[str]:
    return [key for key in thin.shapes if any(vector.terms[0][1].shape(key) for vector in thin.vectors.values())]


def _vectors(suite: Suite) -> TaskVectors:
    return task_vectors(suite.experts())


def _updates(vectors: TaskVectors, key: str) -> torch.Tensor:
    return torch.stack([vector[key] for vector in vectors.vectors.values()])


@torch.no_grad()
def _inputs(suite: Suite, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the base gives each of some layers, [_INPUTS, in]; a module is known by its weights."""
    experts = suite.experts()
    encoder, head = experts.base.encoder.module(), next(iter(experts.heads.values()))
    seen: dict[str, list[torch.Tensor]] = {key: [] for key in weights}

    def listen(key: str) -> Any:
        def hook(module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
            states = arguments[0]
            seen[key].append(states.reshape(-1, states.shape[-1])[:: max(1, states[..., 0].numel() // 128)])

        return hook

    for module in encoder.modules():
        if isinstance(module, torch.nn.Linear):
            flat = module.weight.detach().reshape(-1)
            for key, weight in weights.items():
                if flat.shape == weight.shape and torch.equal(flat, weight):
                    module.register_forward_pre_hook(listen(key))
    for task in suite.tasks.values():
        batch = suite.processor(task["test"].inputs[:32])
        experts.family.features(encoder, batch, head.pooling or experts.family.default_pooling)
    generator = torch.Generator().manual_seed(0)
    found = {}
    for key, states in seen.items():
        rows = torch.cat(states)
        found[key] = rows[torch.randperm(len(rows), generator=generator)[:_INPUTS]]
    return found
