"""How much of a merge's vector a trained mask removes, layer by layer.

MOMA, arXiv 2412.13526 v3, Section 4 and Figure 8: theta = theta_b + M * delta, delta the vector of the merge it started
from. The mask is not stored but follows from the weights: M = (theta - theta_b) / delta wherever delta is not zero.
An element is masked where M is less than half of the most that it could be (`cap`).

Letters: theta, theta_b, delta, M [k], one run of elements.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, cast

import torch

from orthomerge.analysis.conflict import in_order, layer_of
from orthomerge.analysis.figures import Bars, Series
from orthomerge.core.errors import RecipeError
from orthomerge.merging.kinds import Block, SurveyMethod, TensorMethod
from orthomerge.merging.methods import make_method
from orthomerge.merging.stream import merge_blocks, prepare
from orthomerge.merging.vectors import TaskVectors
from orthomerge.models.tensors import Tensors

_Run = tuple[str, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Masking:
    """Share of the changed elements that is masked: in all, and by layer."""

    total: float
    layers: dict[str, float]

    @classmethod
    def of(cls, counts: Iterable[tuple[str, int, int]]) -> Masking:
        """From names of tensors with counts of `masked`."""
        off: dict[str, int] = {}
        changed: dict[str, int] = {}
        for name, masked_count, count in counts:
            layer = layer_of(name)
            off[layer] = off.get(layer, 0) + masked_count
            changed[layer] = changed.get(layer, 0) + count
        if not sum(changed.values()):
            raise RecipeError("a mask over a vector of zeros masks nothing; it has no rate")
        rates = {layer: off[layer] / changed[layer] for layer in in_order(changed) if changed[layer]}
        return cls(sum(off.values()) / sum(changed.values()), rates)

    def figure(self) -> Bars:
        """The rates by layer in percent."""
        return Bars(
            "masking",
            "How much the mask takes away",
            "Share of the merged vector's elements that the mask makes less than half of; "
            f"{100 * self.total:.1f} % in all.",
            tuple(self.layers),
            "%",
            (Series("masked", tuple(100 * rate for rate in self.layers.values())),),
        )


def masked(theta: torch.Tensor, base: torch.Tensor, delta: torch.Tensor, *, cap: float = 1.0) -> tuple[int, int]:
    """How many elements are masked, of how many that the start had changed."""
    changed = delta != 0
    M = (theta.double() - base.double())[changed] / delta.double()[changed]
    return int((cap / 2 > M).sum()), int(changed.sum())


def start_masking(
    facts: Mapping[str, Any], tasks: Sequence[str], merged: Tensors, vectors: TaskVectors
) -> Masking | str:
    """The masking of a model fitted by `moma`, whose start is merged again; a text says why there is none.

    `facts` and `tasks`: of the model. `vectors` must stream in the order of `merged`.
    """
    method = facts["method"]
    parameters = method["parameters"]
    if method["name"] != "moma" or parameters.get("mask") == "none":
        return f"{method['name']} trains no mask that its weights tell"
    if tuple(tasks) != vectors.tasks:
        return "the start can be merged again only from all experts, in the order of the merge"
    options = parameters.get("options", {})
    start = make_method(parameters["start"], options, tasks=vectors.tasks, seed=facts["seed"])
    tensor_method = prepare(cast("TensorMethod | SurveyMethod", start), vectors)  # moma takes no other
    with closing(merge_blocks(vectors, tensor_method, _run)) as runs:
        return Masking.of(_counts(merged, runs, vectors.shapes, cap=float(parameters.get("cap", 1.0))))


def _run(block: Block, weights: torch.Tensor) -> _Run:
    """Name, base and vector of one run of the start, flat."""
    return block.site.key, block.base.reshape(-1), (weights - block.base).reshape(-1)


def _counts(
    merged: Tensors, runs: Iterator[_Run], names: Collection[str], *, cap: float
) -> Iterator[tuple[str, int, int]]:
    """The counts of each run, the model and its start streamed side by side."""
    for key, blocks in groupby(merged.blocks(), key=itemgetter(0)):
        theta = torch.cat([block.reshape(-1) for _, block in blocks])
        place = 0
        while key in names and place < len(theta):
            name, base, delta = next(runs)
            if name != key:
                raise AssertionError(f"the model streams {key!r} where its start streams {name!r}")
            yield key, *masked(theta[place : place + len(base)].float(), base, delta, cap=cap)
            place += len(base)
