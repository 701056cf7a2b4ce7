"""Sizes, angles, signs and ranks of task vectors, streamed tensor by tensor.

Sign conflict after Yadav et al. 2023 (TIES), arXiv 2306.01708; cosine after Ilharco et al. 2023, arXiv 2212.04089;
effective rank after Roy and Vetterli 2007, of the squared singular values: exp(-sum p log p), p = s^2 / sum s^2.

Letters: T tasks, L layers; tau_t = theta_t - theta_b, deltas [T, k] of one block. A layer's number is the
first number in a tensor's name; tensors without a number belong to `embeddings` or `final`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

import torch

from orthomerge.analysis.diagnosis import Heat
from orthomerge.core.errors import NumericalError
from orthomerge.merging.vectors import TaskVectors

_TINY = 1e-7  # the sign of a smaller change may be rounding
_EARLY = re.compile(r"embed|shared|cls_token|class_token|position|pre_layrnorm|patch")
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Conflict:
    """Agreement of task vectors; undefined values are NaN.

    `norms` [L, T]: |tau| / |theta_b| of a layer. `ranks` [L, T]: mean effective rank of its matrices. `cosine`, `signs`
    [T, T]: of all elements; signs: of those that both experts changed, the share with opposite signs.
    """

    tasks: tuple[str, ...]
    layers: tuple[str, ...]
    norms: Matrix
    ranks: Matrix
    cosine: Matrix
    signs: Matrix

    @classmethod
    def of(cls, vectors: TaskVectors) -> Conflict:
        """Stream all vectors once; matrices of numbered layers are read whole, for their ranks."""
        tasks, layers = vectors.tasks, in_order(map(layer_of, vectors.shapes))
        products = torch.zeros(len(tasks), len(tasks), dtype=torch.float64)
        both, opposite = torch.zeros_like(products), torch.zeros_like(products)
        squares = torch.zeros(len(layers), len(tasks), dtype=torch.float64)
        base = torch.zeros(len(layers), dtype=torch.float64)
        ranks: dict[tuple[str, int], list[float]] = {}
        for key, shape in vectors.shapes.items():
            layer = layer_of(key)
            row = layers.index(layer)
            is_matrix = len(shape) == 2 and min(shape) > 1 and _NUMBER.search(key) is not None
            for block in vectors.blocks(keys=(key,), scope="matrix" if is_matrix else "element"):
                deltas = block.deltas.reshape(len(tasks), -1).double()
                gram = deltas @ deltas.T
                if not gram.isfinite().all():
                    raise NumericalError(f"{key!r} holds NaN or infinity in the base or an expert; fetch it again")
                products += gram
                squares[row] += gram.diagonal()
                base[row] += block.base.double().square().sum()
                signs = torch.where(deltas.abs() > _TINY, deltas.sign(), 0.0)
                shared = signs.abs() @ signs.abs().T
                both += shared
                opposite += (shared - signs @ signs.T) / 2
                if is_matrix:
                    for task, delta in enumerate(block.deltas):
                        rank = effective_rank(delta)
                        if not math.isnan(rank):
                            ranks.setdefault((layer, task), []).append(rank)
        sizes = products.diagonal().sqrt()
        return cls(
            tasks,
            layers,
            _matrix((squares / base[:, None]).sqrt()),
            tuple(tuple(fmean(ranks.get((layer, task), [math.nan])) for task in range(len(tasks))) for layer in layers),
            _matrix((products / torch.outer(sizes, sizes)).clamp(-1, 1)),
            _matrix(opposite / both),
        )

    def figures(self) -> tuple[Heat, ...]:
        """Make heat maps of norms and ranks by layer, and of cosines and signs by pair of tasks."""
        ranked = [
            (layer, row) for layer, row in zip(self.layers, self.ranks, strict=True) if not all(map(math.isnan, row))
        ]
        norms = Heat(
            "vector-norms",
            "How far each expert moved",
            "Length of the task vector as a share of the base's weights, layer by layer.",
            self.layers,
            self.tasks,
            _percent(self.norms),
            "% of the base",
        )
        cosines = Heat(
            "vector-cosines",
            "Angles between task vectors",
            "Cosine of all changes of two experts together: 0 at right angles, 1 the same direction.",
            self.tasks,
            self.tasks,
            self.cosine,
            "cosine",
            diverging=True,
        )
        signs = Heat(
            "sign-conflicts",
            "Where experts pull in opposite directions",
            "Share of the weights changed by both experts (by more than 1e-7) that one raises and the other lowers; 50 "
            "% is chance.",
            self.tasks,
            self.tasks,
            _percent(self.signs),
            "%",
        )
        ranks = Heat(
            "vector-ranks",
            "How many directions each expert uses",
            "Effective rank of the task vector's matrices, mean over the layer: exp of the entropy of the squared "
            "singular values.",
            tuple(layer for layer, _ in ranked),
            self.tasks,
            tuple(row for _, row in ranked),
            "effective rank",
        )
        pairs = (cosines, signs) if len(self.tasks) > 1 else ()
        return (norms, *pairs, ranks) if ranked else (norms, *pairs)


def layer_of(name: str) -> str:
    """Return the layer of a tensor: `layer 3` for `encoder.layer.3.output.dense.weight`, `decoder 3` in a decoder."""
    number = _NUMBER.search(name)
    if number is None:
        return "embeddings" if _EARLY.search(name) else "final"
    return f"{'decoder' if name.startswith('decoder.') else 'layer'} {number[1]}"


def in_order(layers: Iterable[str]) -> tuple[str, ...]:
    def place(layer: str) -> tuple[int, int]:
        kind, _, number = layer.partition(" ")
        return ("embeddings", "layer", "decoder", "final").index(kind), int(number or 0)

    return tuple(sorted(set(layers), key=place))


def effective_rank(matrix: torch.Tensor) -> float:
    """Return the effective rank, between 1 and the smaller side; NaN for a matrix of zeros."""
    X = matrix.double() if matrix.shape[0] <= matrix.shape[1] else matrix.double().T
    values = torch.linalg.eigvalsh(X @ X.T).clamp_min(0)
    total = float(values.sum())
    return math.exp(float(torch.special.entr(values / total).sum())) if total > 0 else math.nan


def _matrix(values: torch.Tensor) -> Matrix:
    return tuple(map(tuple, values.tolist()))


def _percent(values: Matrix) -> Matrix:
    return tuple(tuple(100 * value for value in row) for row in values)
