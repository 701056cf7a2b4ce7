"""The best map from merged to expert features in each family of MOMA's Table 1, by the aligner of that name.

arXiv 2412.13526 v3, Eq. 7. An aligner folds its map into the first linear map of a head. Of a head whose first map is
the identity, what comes back is the map itself, and its strength was chosen by the distance of held-out features.

Letters: H, T [n, d] what the head reads of merged encoder and expert, rows are inputs; a map is G(h) = A h + c.

Differs from the paper: squared distances, a prior at the identity, closed forms; see `alignment`. As in its Table 1
the affine map alone has a shift; `rigid`, the orthogonal map with one, is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from orthomerge.alignment.aligners import make_aligner
from orthomerge.alignment.folding import first_map
from orthomerge.alignment.problem import Problem
from orthomerge.core.errors import RecipeError, nearest
from orthomerge.models.features import FeaturePair, Features
from orthomerge.models.heads import Head, Linear

_ALIGNERS = {"rigid": "orthogonal"}
_SHIFTED = ("rigid", "affine")
FAMILIES = ("none", "scaling", "orthogonal", "similarity", "rigid", "invertible", "linear", "affine")


@dataclass(frozen=True, eq=False)
class Map:
    """A [d, d], and c [d] where there is one; None stands for the identity."""

    A: torch.Tensor | None = None
    c: torch.Tensor | None = None

    def __call__(self, H: torch.Tensor) -> torch.Tensor:
        """G of every row, in float64."""
        mapped = H.double() if self.A is None else H.double() @ self.A.T
        return mapped if self.c is None else mapped + self.c


def fit_maps(H: torch.Tensor, T: torch.Tensor, *, task: str, families: Sequence[str] = FAMILIES) -> dict[str, Map]:
    """The best map of every family, fitted to all rows; one row alone leaves everything as it is."""
    problems = {biased: _problem(H, T, task, biased=biased) for biased in (False, True)}
    found: dict[str, Map] = {}
    for family in families:
        if family not in FAMILIES:
            raise RecipeError(f"unknown family of maps {family!r}; {nearest(family, FAMILIES)}")
        if family == "none":
            found[family] = Map()
            continue
        aligner: Any = make_aligner(_ALIGNERS.get(family, family))
        first = first_map(aligner.align(problems[family in _SHIFTED]).classifier)
        found[family] = Map(first.weight.double(), first.bias)
    return found


def _problem(H: torch.Tensor, T: torch.Tensor, task: str, *, biased: bool) -> Problem:
    pair = FeaturePair(Features(H.double(), task, "train"), Features(T.double(), task, "train"))
    d = H.shape[1]
    identity = Linear(torch.eye(d, dtype=torch.float64), torch.zeros(d, dtype=torch.float64) if biased else None)
    blank = Linear(torch.zeros(1, d, dtype=torch.float64))
    return Problem.of(pair, Head(blank, ("",), identity, "tanh"))
