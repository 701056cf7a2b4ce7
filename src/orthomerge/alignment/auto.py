"""The aligner to use when none is named: the best for the number of inputs, and only if held-out inputs agree.

- fewer than `few` inputs a class: `kl-map` with its default prior. Logits of so few inputs are too unequal for least
  squares, and cross-validation is too noisy to choose by.
- up to `many`: `ridge`, its strength by exact leave-one-out.
- more: `kl-map`, its strength by cross-validation, or `ridge`, as held-out inputs say: both are fitted without the same
  ones, 500 of them or, in folds, all, and judged by the same KL. A difference of less than a standard error says
  nothing. Then it is `ridge` with fewer than four inputs a feature, where a KL that is a little lower comes with fewer
  right answers, and else `kl-map`: with enough inputs the right loss wins.

An alignment is kept only if it lowers a loss on inputs that it was fitted without: the mean KL to the expert's outputs
or, between `few` and `many`, the squared error of the logits. Else the head stays as it is, and the facts say so. With
few inputs a class the head stays only if the loss rises by more than chance (two standard errors), and with fewer than
two it is not asked: a held-out input is then the only one of its class, which no fit without it can know about, and the
prior is the only guard. One input alone changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from orthomerge.alignment.aligner import Alignment
from orthomerge.alignment.kl_map import DEFAULT, KlMap, KlProblem
from orthomerge.alignment.problem import Problem
from orthomerge.alignment.ridge import Ridge
from orthomerge.errors import RecipeError
from orthomerge.features.features import FeaturePair
from orthomerge.heads import Head

__all__ = ["Auto"]

_DOUBT = 2.0  # standard errors
_PLENTY = 4.0  # inputs a feature from which kl-map has the benefit of the doubt
_PAIR = 2.0  # inputs a class from which a held-out one leaves another of its class behind


@dataclass(frozen=True)
class Auto:
    """`few` and `many`: mean numbers of inputs a class at which the aligner changes. `device`: see `kl-map`."""

    few: float = 4.0
    many: float = 25.0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not 0 <= self.few <= self.many:
            raise RecipeError(f"'few' and 'many' must be 0 <= few <= many, got {self.few} and {self.many}")

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        return self.align(Problem.of(pair, head))

    def align(self, problem: Problem) -> Alignment:
        per_class = len(problem.H) / len(problem.head.labels)
        if len(problem.H) < 2:
            return Alignment(problem.head, {"kept": False, "why": "one input cannot be judged"})
        if self.few <= per_class < self.many:
            found = Ridge().align(problem)
            return self._judged(problem, found, "ridge", kept=not math.isinf(problem.strength))
        kl = KlProblem(problem, device=self.device)
        if per_class >= self.many:
            return self._better(problem, kl)
        before, after = (kl.held_out(strength)[0] for strength in (math.inf, DEFAULT))
        worse = after - before
        allowed = _DOUBT * float(worse.std()) / math.sqrt(len(worse))
        if per_class >= _PAIR and float(worse.mean()) > allowed:
            return self._judged(problem, Alignment(problem.head), "kl-map", kept=False)
        return self._judged(problem, KlMap(DEFAULT, device=self.device).align(problem), "kl-map", kept=True)

    def _better(self, problem: Problem, kl: KlProblem) -> Alignment:
        """What lowers the divergence of held-out inputs more; in doubt, what the number of inputs speaks for."""
        chosen = kl.chosen()
        none, ours, ridge = kl.rivals(chosen)
        gain, plenty = ours - ridge, len(problem.H) >= _PLENTY * problem.head.width
        doubt = float(gain.std()) / math.sqrt(len(gain))
        if float(gain.mean()) > (doubt if plenty else -doubt):
            return self._judged(problem, Ridge().align(problem), "ridge", kept=float((ridge - none).mean()) <= 0)
        found = KlMap(chosen, device=self.device).align(problem)
        return self._judged(problem, found, "kl-map", kept=float((ours - none).mean()) <= 0)

    def _judged(self, problem: Problem, found: Alignment, aligner: str, *, kept: bool) -> Alignment:
        if kept:
            return Alignment(found.classifier, {"kept": True, "aligner": aligner, **found.facts})
        return Alignment(problem.head, {"kept": False, "aligner": aligner, "why": "no held-out loss fell"})
