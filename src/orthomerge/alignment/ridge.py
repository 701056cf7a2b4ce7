"""The head by least squares to the expert's logits, shrunk towards the expert's head; strength by exact leave-one-out.

The posterior mean of a Bayesian linear regression with its prior at the fine-tuned head; see `least_squares` for the
formula. A head with a hidden layer is fitted at its first map, to what the expert's hidden layer gets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from orthomerge.alignment.aligner import Alignment
from orthomerge.alignment.checks import strength
from orthomerge.alignment.folding import centred_rows, first_map, with_first_map
from orthomerge.alignment.least_squares import linear_map, ridge_change, strength_from_sums
from orthomerge.alignment.problem import Problem
from orthomerge.alignment.sums import Sums
from orthomerge.features.features import FeaturePair
from orthomerge.heads import Head

__all__ = ["Ridge"]


@dataclass(frozen=True)
class Ridge:
    """`strength` of the pull to the expert's head: 0 for plain least squares, auto for leave-one-out."""

    strength: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        strength("strength", self.strength)

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        return self.align(Problem.of(pair, head))

    def align(self, problem: Problem) -> Alignment:
        chosen = problem.strength if self.strength == "auto" else self.strength
        change = ridge_change(problem.spectrum, problem.residual, chosen, seen=problem.seen)
        first, d = first_map(problem.head), problem.head.width
        weight = first.weight.double() + change[:, :d]
        bias = None if first.bias is None else first.bias.double() + problem.spectrum.a * change[:, d]
        return Alignment(with_first_map(problem.head, weight, bias, task=problem.task), {"strength": chosen})

    def solve(self, sums: Sums, head: Head) -> Alignment:
        """From sums alone; the strength is then chosen by folds."""
        chosen = strength_from_sums(sums, head) if self.strength == "auto" else self.strength
        first, W = first_map(head), centred_rows(head)
        read, shift = linear_map(sums.total, chosen, W, biased=first.bias is not None)
        weight = first.weight.double() + (read - W)  # in this order: no change is none to the last bit
        bias = None if first.bias is None or shift is None else first.bias.double() + shift
        return Alignment(with_first_map(head, weight, bias, task=sums.task), {"strength": chosen})
