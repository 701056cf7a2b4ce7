"""How much of a merge's vector a trained mask lets through, layer by layer.

MOMA, arXiv 2412.13526 v3, Section 4 and Figure 8: theta = theta_b + M * delta, delta the vector of the merge it started
from. The mask is not stored, but the weights tell it: M = (theta - theta_b) / delta wherever delta is not zero.
An element is masked where M is less than half of the most that it could be (`cap`).

Letters: theta, theta_b, delta, M [k], one run of elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast

import torch

from orthomerge.analysis.conflict import in_order, layer_of
from orthomerge.analysis.figures import Bars, Series
from orthomerge.core.errors import IncompatibleError, RecipeError
from orthomerge.merging.kinds import Block, SurveyMethod, TensorMethod
from orthomerge.merging.methods import make_method
from orthomerge.merging.stream import merge_blocks, prepare
from orthomerge.merging.vectors import TaskVectors

if TYPE_CHECKING:
    from orthomerge.models.tensors import Tensors


_Run = tuple[str, torch.Tensor, torch.Tensor]


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


def start_masking(
    facts: Mapping[str, Any], tasks: Sequence[str], merged: Tensors, vectors: TaskVectors
) -> Masking | str:
    """The masking rates of a model that `moma` made, its start merged again; or why there are none, in words.

    `facts` and `tasks`: of the model. `vectors` must stream in the order of `merged`.
    """
    method = facts["method"]
    parameters = method["parameters"]
    if method["name"] != "moma" or parameters.get("mask") == "none":
        return f"{method['name']} trains no mask that its weights tell"
    if tuple(tasks) != vectors.tasks:
        return "the start can be merged again only from all experts, in the order of the merge"
    options = parameters.get("options", {})
    made = make_method(parameters["start"], options, tasks=vectors.tasks, seed=facts["seed"])
    start = cast("TensorMethod | SurveyMethod", made)  # moma takes no other
    with closing(merge_blocks(vectors, prepare(start, vectors), _run)) as runs:
        return masking_rates(_counts(merged, vectors, runs, cap=float(parameters.get("cap", 1.0))))


def _run(block: Block, weights: torch.Tensor) -> _Run:
    """Name, base and vector of one run of the start, flat."""
    return block.site.key, block.base.reshape(-1), (weights - block.base).reshape(-1)


def _counts(
    merged: Tensors, vectors: TaskVectors, runs: Iterator[_Run], *, cap: float
) -> Iterator[tuple[str, int, int]]:
    """What `masked` says of each run, both streams side by side."""
    shapes = vectors.shapes
    for key, theta in _whole_tensors(merged):
        start = 0
        while key in shapes and start < len(theta):
            name, base, delta = next(runs)
            if name != key:
                raise AssertionError(f"the model streams {key!r} where its start streams {name!r}")
            yield key, *masked(theta[start : start + len(base)].float(), base, delta, cap=cap)
            start += len(base)


def _whole_tensors(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in order, flat."""
    for key, blocks in groupby(tensors.blocks(), key=itemgetter(0)):
        yield key, torch.cat([block.reshape(-1) for _, block in blocks])
