"""How much of a merge's vector a trained mask lets through, layer by layer.

MOMA, arXiv 2412.13526 v3, Section 4 and Figure 8: theta = theta_b + M * delta, delta the vector of the merge it started
from. The mask is not stored, but the weights tell it: M = (theta - theta_b) / delta wherever delta is not zero.
An element is masked where M is less than half of the most that it could be (`cap`).

Letters: theta, theta_b, delta, M [k], one run of elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, cast

import torch

from orthomerge.analysis.conflict import in_order, layer_of
from orthomerge.analysis.figures import Bars, Series
from orthomerge.errors import IncompatibleError, RecipeError
from orthomerge.merging.kinds import Block, SurveyMethod, TensorMethod
from orthomerge.merging.methods import make_method
from orthomerge.merging.stream import merge_blocks, prepare
from orthomerge.merging.vectors import TaskVectors, Weights

__all__ = ["Masking", "masked", "masking_figure", "masking_rates", "start_masking"]


@dataclass(frozen=True)
class Masking:
    """Share of the changed elements that is masked: in all, and by layer."""

    total: float
    layers: dict[str, float]


def masked(theta: torch.Tensor, base: torch.Tensor, delta: torch.Tensor, *, cap: float = 1.0) -> tuple[int, int]:
    """How many elements are masked, of how many that the merge had changed."""
    if not theta.shape == base.shape == delta.shape:
        raise IncompatibleError(
            f"weights, base and vector must be of one shape, got {list(theta.shape)}, {list(base.shape)} and "
            f"{list(delta.shape)}"
        )
    live = delta != 0
    M = (theta.double() - base.double())[live] / delta.double()[live]
    return int((cap / 2 > M).sum()), int(live.sum())


def masking_rates(parts: Iterable[tuple[str, int, int]]) -> Masking:
    """From tensors' names with what `masked` says of them, or of runs of them."""
    off: dict[str, int] = {}
    of: dict[str, int] = {}
    for name, count, live in parts:
        layer = layer_of(name)
        off[layer] = off.get(layer, 0) + count
        of[layer] = of.get(layer, 0) + live
    if not sum(of.values()):
        raise RecipeError("a mask over a vector of zeros masks nothing; there is no rate to tell")
    rates = {layer: off[layer] / of[layer] for layer in in_order(of) if of[layer]}
    return Masking(sum(off.values()) / sum(of.values()), rates)


def masking_figure(found: Masking) -> Bars:
    return Bars(
        "masking",
        "How much the mask takes away",
        "Share of the merged vector's elements that the mask makes less than half of; "
        f"{100 * found.total:.1f} % in all.",
        tuple(found.layers),
        "%",
        (Series("masked", tuple(100 * rate for rate in found.layers.values())),),
    )


def start_masking(manifest: Mapping[str, Any], merged: Weights, vectors: TaskVectors) -> Masking | str:
    """The masking rates of an output that `moma` made, its start merged again; or why there are none, in words."""
    method = manifest["method"]
    given = method["parameters"]
    if method["name"] != "moma" or given.get("mask") == "none":
        return f"{method['name']} trains no mask that its weights tell"
    if tuple(manifest["inputs"]["experts"]) != vectors.tasks:
        return "the start can be merged again only from all experts, in the order of the merge"
    found = make_method(given["start"], given.get("options", {}), tasks=vectors.tasks, seed=manifest["seed"])
    start = cast("TensorMethod | SurveyMethod", found)  # moma takes no other

    def told(block: Block, weights: torch.Tensor) -> tuple[str, int, int]:
        site = block.site
        theta = merged.read(site.key, site.start, site.start + block.base.numel()).reshape(block.base.shape)
        return site.key, *masked(theta, block.base, weights - block.base, cap=float(given.get("cap", 1.0)))

    with closing(merge_blocks(vectors, prepare(start, vectors), told)) as parts:
        return masking_rates(parts)
