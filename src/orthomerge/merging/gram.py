"""Inner products of base and deltas, tensor by tensor, from one streamed pass.

Norms, cosines and the angles between the experts' weights all follow from the Gram matrix of [theta_b, tau_1
.. tau_T]. Summed in float64 over runs of one fixed length: the same bits whatever the size of the blocks.
"""

import torch

from orthomerge.merging.kinds import Vectors
from orthomerge.merging.runs import runs


def grams(vectors: Vectors) -> dict[str, torch.Tensor]:
    """Of each tensor that has elements: G [1 + T, 1 + T] in float64, row 0 the base, row t the t-th delta."""
    found: dict[str, torch.Tensor] = {}
    for site, rows in runs(vectors):
        product = rows @ rows.T
        found[site.key] = found[site.key].add_(product) if site.key in found else product
    return found
