"""CKA of the updates of full and of LoRA experts, layer by layer, on what the base's own layers are given.

It is the mean over pairs of experts of the CKA of X M_t^T (KnOTS, Stoica et al. 2025, arXiv 2410.19735). Theorem: in
the joint basis of KnOTS an expert's part S V_t^T = U^T M_t has the very same CKA, for U keeps all angles and lengths
between the outputs. Only without S, as X V_t, does the number move: every direction then counts alike. Differs from the
paper: the authors' code has no CKA, so which inputs, and whether with S, is our choice.

Letters: X [n, k] inputs; T experts; M_t [m, k] the update of one layer.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any, Literal

import torch

from orthomerge.analysis.layers import linear_cka
from orthomerge.merging.knots import joint_basis, parts
from orthomerge.merging.merge import task_vectors
from orthomerge.merging.vectors import TaskVectors
from orthomerge.suites.suite import Suite

View = Literal["updates", "parts", "directions"]
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


def update_cka(updates: torch.Tensor, *, inputs: torch.Tensor | None = None, view: View = "updates") -> float:
    """Mean unbiased CKA over all pairs of experts; NaN if no two of them change anything.

    `updates` [T, m, k]. `inputs` X [n, k]: the k coordinates themselves if None. `view`: the updates, their parts
    S V_t^T in the joint basis, or V_t^T alone.
    """
    viewed = updates.double()
    if view != "updates":
        viewed = parts(joint_basis(updates, key="updates"), updates).double()
    if view == "directions":
        viewed = viewed / viewed.square().sum((0, 2)).sqrt()[:, None]  # the norm of a row over all experts is S
    X = torch.eye(updates.shape[2], dtype=torch.float64) if inputs is None else inputs.double()
    values = [linear_cka(one, other) for one, other in combinations([X @ M.T for M in viewed], 2)]
    values = [value for value in values if math.isfinite(value)]
    return sum(values) / len(values) if values else math.nan


def adapted_share(lora: Suite) -> float:
    """The share of the encoder's weights that the adapters change."""
    thin = _vectors(lora)
    sizes = {key: torch.Size(shape).numel() for key, shape in thin.shapes.items()}
    return sum(sizes[key] for key in _adapted(thin)) / sum(sizes.values())


def _adapted(thin: TaskVectors) -> list[str]:
    return [key for key in thin.shapes if any(vector.terms[0][1].shape(key) for vector in thin.vectors.values())]


def _vectors(suite: Suite) -> TaskVectors:
    return task_vectors(suite.experts)


def _updates(vectors: TaskVectors, key: str) -> torch.Tensor:
    return torch.stack([vector[key] for vector in vectors.vectors.values()])


@torch.no_grad()
def _inputs(suite: Suite, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the base gives each of some layers, [_INPUTS, in]; a module is known by its weights."""
    experts = suite.experts
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
