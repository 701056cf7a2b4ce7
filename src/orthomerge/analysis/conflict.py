"""Do task vectors agree? Their sizes, angles, signs and ranks, streamed tensor by tensor.

Sign conflict after Yadav et al. 2023 (TIES), arXiv 2306.01708; cosine after Ilharco et al. 2023, arXiv 2212.04089;
effective rank after Roy and Vetterli 2007, of the squared singular values: exp(-sum p log p), p = s^2 / sum s^2.

Letters: T tasks, L layers; tau_t = theta_t - theta_b, deltas [T, k] of one run of elements. A layer's number is the
first number in a tensor's name; what has none is `embeddings` or `final`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from orthomerge.analysis.checking import whole
from orthomerge.analysis.figures import Heat
from orthomerge.core.errors import NumericalError
from orthomerge.merging.kinds import Block
from orthomerge.merging.vectors import TaskVectors

TINY = 1e-7  # of smaller changes nobody can tell the sign from rounding
_EARLY = re.compile(r"embed|shared|cls_token|class_token|position|pre_layrnorm|patch")
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")

Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Conflict:
    """`norms` [L, T]: |tau| / |theta_b| of a layer. `ranks` [L, T]: mean effective rank of its matrices.

    `cosine`, `signs` [T, T]: of all elements; signs: the share of those that both experts changed whose signs differ.
    """

    tasks: tuple[str, ...]
    layers: tuple[str, ...]
    norms: Table
    ranks: Table
    cosine: Table
    signs: Table


def layer_of(name: str) -> str:
    """`layer 3` of `encoder.layer.3.output.dense.weight`; `decoder 3` in a decoder."""
    found = _NUMBER.search(name)
    if found is None:
        return "embeddings" if _EARLY.search(name) else "final"
    return f"{'decoder' if name.startswith('decoder.') else 'layer'} {found[1]}"


def in_order(layers: Iterable[str]) -> tuple[str, ...]:
    """Layers from first to last, each once."""

    def place(layer: str) -> tuple[int, int]:
        kind, _, number = layer.partition(" ")
        return ("embeddings", "layer", "decoder", "final").index(kind), int(number or 0)

    return tuple(sorted(set(layers), key=place))


def effective_rank(matrix: torch.Tensor) -> float:
    """Between 1 and the smaller side; NaN of a matrix of zeros."""
    X = whole(matrix, what="a matrix")
    if X.shape[0] > X.shape[1]:
        X = X.T
    values = torch.linalg.eigvalsh(X @ X.T).clamp_min(0)
    total = float(values.sum())
    if total <= 0:
        return math.nan
    p = values / total
    return math.exp(float(torch.special.entr(p).sum()))


def survey(vectors: TaskVectors, *, tiny: float = TINY, ranks: bool = True) -> Conflict:
    """One pass over all blocks; matrices of the numbered layers are read whole, for their ranks."""
    tally = _Tally(vectors.tasks, in_order(map(layer_of, vectors.shapes)), tiny)
    for key, shape in vectors.shapes.items():
        matrix = ranks and len(shape) == 2 and min(shape) > 1 and _NUMBER.search(key) is not None
        for block in vectors.blocks(keys=(key,), scope="matrix" if matrix else "element"):
            tally.add(block)
            if matrix:
                tally.add_ranks(block)
    return tally.conflict()


class _Tally:
    """Sums so far, in float64."""

    def __init__(self, tasks: tuple[str, ...], layers: tuple[str, ...], tiny: float) -> None:
        self._tasks, self._layers, self._tiny = tasks, layers, tiny
        count = len(tasks)
        self._products = torch.zeros(count, count, dtype=torch.float64)
        self._both, self._against = torch.zeros_like(self._products), torch.zeros_like(self._products)
        self._squares = torch.zeros(len(layers), count, dtype=torch.float64)
        self._base = torch.zeros(len(layers), dtype=torch.float64)
        self._ranks: list[list[list[float]]] = [[[] for _ in tasks] for _ in layers]

    def add(self, block: Block) -> None:
        deltas = block.deltas.reshape(len(self._tasks), -1).double()
        products = deltas @ deltas.T
        if not products.isfinite().all():
            raise NumericalError(f"{block.site.key!r} holds NaN or infinity in the base or an expert; fetch it again")
        layer = self._layers.index(layer_of(block.site.key))
        self._products += products
        self._squares[layer] += products.diagonal()
        self._base[layer] += block.base.double().square().sum()
        signs = torch.where(deltas.abs() > self._tiny, deltas.sign(), 0.0)
        alike, both = signs @ signs.T, signs.abs() @ signs.abs().T
        self._both += both
        self._against += (both - alike) / 2

    def add_ranks(self, block: Block) -> None:
        layer = self._layers.index(layer_of(block.site.key))
        for known, delta in zip(self._ranks[layer], block.deltas, strict=True):
            known.append(effective_rank(delta))

    def conflict(self) -> Conflict:
        sizes = self._products.diagonal().sqrt()
        return Conflict(
            self._tasks,
            self._layers,
            _table((self._squares / self._base[:, None]).sqrt()),
            tuple(tuple(_mean(known) for known in row) for row in self._ranks),
            _table((self._products / torch.outer(sizes, sizes)).clamp(-1, 1)),
            _table(self._against / self._both),
        )


def conflict_figures(found: Conflict) -> tuple[Heat, ...]:
    """Sizes and ranks by layer; cosines and signs by pair, where there are two tasks or more."""
    figures = [
        Heat(
            "vector-norms",
            "How far each expert moved",
            "Length of the task vector as a share of the base's weights, layer by layer.",
            found.layers,
            found.tasks,
            tuple(tuple(100 * value for value in row) for row in found.norms),
            "% of the base",
        )
    ]
    if len(found.tasks) > 1:
        figures += [
            Heat(
                "vector-cosines",
                "Angles between task vectors",
                "Cosine of all changes of two experts together: 0 at right angles, 1 the same direction.",
                found.tasks,
                found.tasks,
                found.cosine,
                "cosine",
                diverging=True,
            ),
            Heat(
                "sign-conflicts",
                "Where experts pull in opposite directions",
                "Share of the weights changed by both experts (by more than 1e-7) that one raises and the other "
                "lowers; 50 % is chance.",
                found.tasks,
                found.tasks,
                tuple(tuple(100 * value for value in row) for row in found.signs),
                "%",
            ),
        ]
    rows = [(layer, row) for layer, row in zip(found.layers, found.ranks, strict=True) if not all(map(math.isnan, row))]
    if rows:
        figures.append(
            Heat(
                "vector-ranks",
                "How many directions each expert uses",
                "Effective rank of the task vector's matrices, mean over the layer: exp of the entropy of the squared "
                "singular values.",
                tuple(layer for layer, _ in rows),
                found.tasks,
                tuple(row for _, row in rows),
                "effective rank",
            )
        )
    return tuple(figures)


def _table(values: torch.Tensor) -> Table:
    return tuple(tuple(row) for row in values.tolist())


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan
