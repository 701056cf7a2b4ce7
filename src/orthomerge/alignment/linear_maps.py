"""Linear maps of the features in closed form: the transforms of MOMA's Table 1 except rotations, and ridge.

`linear`, `invertible` and `affine` are least squares from merged to expert features, shrunk towards the identity;
`ridge` fits the head to the expert's logits, shrunk towards the expert's head: the posterior mean of a Bayesian linear
regression. All are one ridge regression; `ridge` is `affine` without changes common to all classes. A head with a
hidden layer is fitted at its first map. `scaling` multiplies every feature by a factor.

Differs from the paper (MOMA, arXiv 2412.13526 v3): the least squares loss, which has a closed form, and a prior,
without which fewer inputs than features would be overfitted.

Letters: H, T [n, d] the head's inputs from the merged encoder and from the expert; W [m, d] its first linear map.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from orthomerge.alignment.aligners import Alignment
from orthomerge.alignment.folding import first_map, folded, with_first_map
from orthomerge.alignment.problem import Problem, Solved, check_strength
from orthomerge.core.checks import fraction


@dataclass(frozen=True)
class Affine(Solved):
    """Affine map (linear without a bias). `strength` of the pull to no change: 0 for none, auto for leave-one-out."""

    strength: float | Literal["auto"] = "auto"

    shifts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_strength("strength", self.strength)

    def align(self, problem: Problem) -> Alignment:
        strength = self.chosen(problem)
        spectrum = problem.spectrum if self.shifts else problem.unshifted
        return Alignment(problem.changed(spectrum.change(self.residual(problem), strength)), {"strength": strength})

    def chosen(self, problem: Problem) -> float:
        return problem.strength if self.strength == "auto" else self.strength

    def residual(self, problem: Problem) -> torch.Tensor:
        """Targets of the regression: T - H under the head's first map, [n, m]."""
        return (problem.T - problem.H) @ first_map(problem.head).weight.double().T


@dataclass(frozen=True)
class Ridge(Affine):
    """Least squares fit of the head to the expert's logits, without changes common to all classes.

    `strength` of the pull to the expert's head: 0 for plain least squares, auto for leave-one-out.
    """

    def residual(self, problem: Problem) -> torch.Tensor:
        return problem.residual


@dataclass(frozen=True)
class Linear(Affine):
    """Any linear map, without a shift. `strength` of the pull to the identity: 0 for none, auto for leave-one-out."""

    shifts: ClassVar[bool] = False


@dataclass(frozen=True)
class Invertible(Linear):
    """Any invertible linear map: the best linear map with its singular values bounded below.

    `strength`: as of `linear`; `floor`: the smallest singular value, as a share of the largest.
    """

    floor: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction(floor=self.floor, one=False)

    def align(self, problem: Problem) -> Alignment:
        strength = self.chosen(problem)
        A = problem.unshifted.change(problem.T - problem.H, strength)
        A.diagonal().add_(1)
        A, condition = lifted(A, self.floor)
        return Alignment(folded(problem.head, A, task=problem.task), {"strength": strength, "condition": condition})


def lifted(A: torch.Tensor, floor: float) -> tuple[torch.Tensor, float]:
    """Raise singular values of A to `floor` of the largest, and return it with its condition number."""
    U, s, Vt = torch.linalg.svd(A)
    if s[-1] < floor * s[0]:
        s = s.clamp_min(floor * float(s[0]))
        A = U * s @ Vt
    return A, float(s[0] / s[-1])


@dataclass(frozen=True)
class Scaling(Solved):
    """Factor per feature; `prior`: weight of the prior at 1, as a number of inputs.

    a_j = (S_jj + p_j) / (C_jj + p_j) minimises sum (a_j h_j - t_j)^2 + p_j (a_j - 1)^2 with C = sum h h^T, S = sum t
    h^T and p_j = prior tr(C) / (n d).
    """

    prior: float = 10.0

    def __post_init__(self) -> None:
        check_strength("prior", self.prior)

    def align(self, problem: Problem) -> Alignment:
        C, S = problem.H.square().sum(0), (problem.T * problem.H).sum(0)
        p = self.prior * C.mean() / len(problem.H)
        a = ((S + p) / (C + p)).nan_to_num(nan=1.0)  # 0 / 0: a feature that is always zero
        first = first_map(problem.head)
        head = with_first_map(problem.head, first.weight.double() * a, first.bias, task=problem.task)
        return Alignment(head, {"least": float(a.min()), "most": float(a.max())})
