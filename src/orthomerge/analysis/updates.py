"""How alike the experts' updates of one layer act on the same inputs: full fine-tuning, LoRA, and LoRA after KnOTS.

After Stoica et al. 2025, arXiv 2410.19735: the mean CKA (Kornblith et al. 2019, arXiv 1905.00414) over pairs of experts
of X M_t^T.

Theorem: in the joint basis of KnOTS an expert's part S V_t^T = U^T M_t has the very same CKA, for U keeps all angles
and lengths between the outputs. Only without S, as X V_t, does the number move: every direction then counts alike.

Letters: T experts; M_t [m, k]; X [n, k], a row for every input of the layer; without X, its k coordinates are inputs.
Differs from the paper: the authors' code has no CKA, so which inputs, and whether with S, is our choice and named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from typing import Literal

import torch

from orthomerge.analysis.cka import linear_cka
from orthomerge.analysis.figures import Heat
from orthomerge.core.errors import RecipeError
from orthomerge.merging.joint import joint_basis, parts

View = Literal["updates", "parts", "directions"]


def update_cka(updates: torch.Tensor, *, inputs: torch.Tensor | None = None, view: View = "updates") -> float:
    """Mean unbiased CKA over all pairs of experts; NaN where no two of them change anything.

    `updates` [T, m, k]. `view`: the updates themselves, their parts S V_t^T in the joint basis, or V_t^T alone.
    """
    if updates.ndim != 3 or len(updates) < 2:
        raise RecipeError(f"updates must be [experts, out, in] of at least two experts, got {tuple(updates.shape)}")
    seen = updates.double()
    if view != "updates":
        seen = parts(joint_basis(updates, key="updates"), updates).double()
    if view == "directions":
        seen = seen / seen.square().sum((0, 2)).sqrt()[:, None]  # the norm of a row over all experts is S
    X = torch.eye(updates.shape[2], dtype=torch.float64) if inputs is None else inputs.double()
    outputs = [X @ M.T for M in seen]
    found = [linear_cka(one, other, unbiased=True) for one, other in combinations(outputs, 2)]
    sound = [value for value in found if math.isfinite(value)]
    return sum(sound) / len(sound) if sound else math.nan


def update_figure(by_kind: Mapping[str, Mapping[str, float]], *, inputs: int) -> Heat:
    """A row for every layer, a column for every kind of experts."""
    layers = tuple(dict.fromkeys(layer for values in by_kind.values() for layer in values))
    return Heat(
        "cka-updates",
        "Do the experts' updates do the same to an input?",
        f"Mean linear CKA (unbiased) over pairs of experts of what their updates make of the same {inputs} inputs of "
        "the layer. KnOTS turns the updates into one basis, which CKA does not see; without their strengths S it does.",
        layers,
        tuple(by_kind),
        tuple(tuple(by_kind[kind].get(layer, math.nan) for kind in by_kind) for layer in layers),
        "CKA",
    )
