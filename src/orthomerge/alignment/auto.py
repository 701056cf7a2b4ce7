"""Default aligner: ridge, kl-map or the mean of both, chosen on held-out inputs, or no change.

- Fewer than `few` inputs per class and than `enough` in all: `kl-map` with its default prior. Logits of so few inputs
  are too unequal for least squares, and cross-validation on them is too noisy.
- More: the mean of the heads by `ridge` and `kl-map`, their strengths by cross-validation. One alone is taken if there
  are `few` inputs per class and its held-out KL is better by more than a standard error.

An alignment is kept only if it lowers a loss on inputs that it was fitted without: the mean KL to the expert's outputs
or the squared error of the logits. With too few inputs for least squares the head is left unchanged only if the loss
rises by more than two standard errors; with fewer than two per class losses are not compared. One input: no change.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch

from orthomerge.alignment.aligners import Alignment
from orthomerge.alignment.folding import first_map, with_first_map
from orthomerge.alignment.kl_map import DEFAULT, KlMap, KlProblem
from orthomerge.alignment.linear_maps import Ridge
from orthomerge.alignment.problem import Problem, Solved
from orthomerge.core.checks import not_negative
from orthomerge.models.heads import Head

_DOUBT = 2.0  # standard errors
_PAIR = 2.0  # inputs per class from which losses are compared
_MEAN = "mean of ridge and kl-map"


@dataclass(frozen=True)
class Auto(Solved):
    """`few` and `enough`: inputs per class, or in all, from which least squares is used. `device`: see `kl-map`."""

    few: float = 4.0
    enough: int = 40
    device: str = "cpu"

    def __post_init__(self) -> None:
        not_negative(few=self.few, enough=self.enough)

    def align(self, problem: Problem) -> Alignment:
        per_class = len(problem.H) / len(problem.head.labels)
        if len(problem.H) < 2:
            return Alignment(problem.head, {"kept": False, "why": "one input cannot be judged"})
        kl = KlProblem(problem, device=self.device)
        if per_class >= self.few or len(problem.H) >= self.enough:
            return self._best(problem, kl, choose=per_class >= self.few)
        before, after = (kl.held_out(strength)[0] for strength in (math.inf, DEFAULT))
        rise, error = _mean_and_error(after - before)
        if per_class >= _PAIR and rise > _DOUBT * error:
            return _judged(problem, Alignment(problem.head), "kl-map", kept=False)
        return _judged(problem, KlMap(DEFAULT, device=self.device).align(problem), "kl-map", kept=True)

    def _best(self, problem: Problem, kl: KlProblem, *, choose: bool) -> Alignment:
        """Return the alignment with the least held-out divergence; the mean of both in doubt, or if not `choose`."""
        chosen = kl.chosen()
        losses = dict(zip(("none", "kl-map", "ridge", _MEAN), kl.candidate_losses(chosen), strict=True))
        taken = _MEAN
        for alone in ("kl-map", "ridge") if choose else ():
            ahead, error = _mean_and_error(losses[_MEAN] - losses[alone])
            if ahead > error:
                taken = alone
        solved = self._solved(problem, taken, chosen)
        lower = float((losses[taken] - losses["none"]).mean()) < 0
        # A finite strength of ridge means that least squares lowers its leave-one-out error.
        kept = (lower or not math.isinf(problem.strength)) and solved.facts.get("strength") != math.inf
        return _judged(problem, solved, taken, kept=kept)

    def _solved(self, problem: Problem, name: str, strength: float) -> Alignment:
        if name == "ridge":
            return Ridge().align(problem)
        kl = KlMap(strength, device=self.device).align(problem)
        return kl if name == "kl-map" else _halfway(problem, Ridge().align(problem), kl)


def _mean_and_error(differences: torch.Tensor) -> tuple[float, float]:
    return float(differences.mean()), float(differences.std()) / math.sqrt(len(differences))


def _halfway(problem: Problem, ridge: Alignment, kl: Alignment) -> Alignment:
    one, other = (first_map(cast("Head", alignment.classifier)) for alignment in (ridge, kl))
    weight = (one.weight.double() + other.weight.double()) / 2
    bias = None if one.bias is None or other.bias is None else (one.bias.double() + other.bias.double()) / 2
    head = with_first_map(problem.head, weight, bias, task=problem.task)
    return Alignment(head, {"strength of ridge": ridge.facts["strength"], "strength of kl-map": kl.facts["strength"]})


def _judged(problem: Problem, solved: Alignment, aligner: str, *, kept: bool) -> Alignment:
    if kept:
        return Alignment(solved.classifier, {"kept": True, "aligner": aligner, **solved.facts})
    return Alignment(problem.head, {"kept": False, "aligner": aligner, "why": "no held-out loss fell"})
