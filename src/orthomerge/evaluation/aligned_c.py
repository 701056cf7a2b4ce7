"""The expert's head, fitted to merged features until it says what the expert said: no labels, no new parameters.

Aligned-C: "Rethink the Evaluation Protocol of Model Merging on Classification Task" (FT-Classifier, Eq. 8) and MOMA
(Eq. 12). From W' = W, b' = b and on unlabelled inputs x, Adam minimises

    mean over x of KL(softmax(teacher(x)) || softmax(head'(g(x; theta_m)))).

All parameters of the head are trained: weight, bias where there is one, and the hidden layer where there is one.

Adam's steps are absolute, so what a learning rate means depends on where the features lie and on their scale. What is
trained is the same head in other coordinates, U = W / s and c = b + W m with logits U (s (f - m)) + c, and folded back:

- `paper`: m = 0, s = 1; for heads that normalise (CLIP, whose weight holds the factor 100) s is the mean norm of W's
  rows, so that U is the unit-norm head of the text tower.
- `tuned`: m = the mean of the head's inputs (0 where there is no bias to take it up), and s such that what is left has
  norm 20 (root mean square): 384 entries of size 1. The result does not depend on the features' unit, nor, with a bias,
  on their origin, and steps are as long for narrow encoders as for wide ones. Above all it converges: features share a
  large mean, along which Adam would otherwise crawl.

Letters: f [n, d] merged features, normalised where the head does so; m [d]; W, U [C, d]; b, c [C]; teacher [n, C].
Differs from the paper: `paper` is the authors' code for BERT (5 epochs, lr 5e-4, one input a step) without the dropout
that their frozen encoder still applies; `tuned`, the default, is trained until it converges, which with hundreds of
inputs and more the authors' recipe does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch.nn.functional import kl_div, log_softmax, normalize

from orthomerge.errors import NumericalError, RecipeError, nearest
from orthomerge.evaluation.evidence import support_of, teacher_of
from orthomerge.evaluation.protocol import Evidence, Need
from orthomerge.heads import Head, Linear

__all__ = ["AlignedC", "Recipe", "Schedule", "divergence"]

Recipe = Literal["paper", "tuned"]

_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-8  # of Adam
_NORM = 20.0  # of the inputs, in the coordinates of the tuned recipe


@dataclass(frozen=True)
class Schedule:
    """Adam's: `most` bounds the number of steps; `decay` lets the learning rate fall to zero along a cosine."""

    epochs: int
    lr: float
    batch: int
    most: int | None
    decay: bool

    def steps(self, count: int) -> int:
        """How many steps `count` inputs get."""
        wanted = self.epochs * math.ceil(count / self.batch)
        return wanted if self.most is None else min(wanted, self.most)


_RECIPES = {
    "paper": Schedule(epochs=5, lr=5e-4, batch=1, most=None, decay=False),
    "tuned": Schedule(epochs=60, lr=5e-3, batch=64, most=3000, decay=True),
}


@dataclass(frozen=True)
class AlignedC:
    """`recipe` sets everything; `epochs`, `lr`, `batch` and `most` (steps) override it where they are given."""

    recipe: Recipe = "tuned"
    epochs: int | None = None
    lr: float | None = None
    batch: int | None = None
    most: int | None = None

    needs: ClassVar[frozenset[Need]] = frozenset({"features", "teacher"})

    def __post_init__(self) -> None:
        if self.recipe not in _RECIPES:
            known = get_args(Recipe)
            raise RecipeError(
                f"'recipe' must be {' or '.join(map(repr, known))}, got {self.recipe!r}; {nearest(self.recipe, known)}"
            )
        for name, count in {"epochs": self.epochs, "batch": self.batch, "most": self.most}.items():
            if count is not None and count < 1:
                raise RecipeError(f"{name!r} must be at least 1, got {count}")
        if self.lr is not None and not 0 < self.lr <= 1:
            raise RecipeError(f"'lr' must be in (0, 1], got {self.lr}")

    @property
    def schedule(self) -> Schedule:
        """The recipe with what was overridden."""
        made = _RECIPES[self.recipe]
        return replace(
            made,
            epochs=made.epochs if self.epochs is None else self.epochs,
            lr=made.lr if self.lr is None else self.lr,
            batch=made.batch if self.batch is None else self.batch,
            most=made.most if self.most is None else self.most,
        )

    def build(self, evidence: Evidence) -> Head:
        who = "aligned-c"
        teacher, support = teacher_of(evidence, who=who), support_of(evidence, who=who)
        head, values = evidence.head, support.values.float()
        inputs = normalize(values, dim=-1) if head.normalise else values
        m, s = self._coordinates(head, inputs)
        layers = _Layers(head, m, s)
        target = teacher.to(inputs.device, torch.float32).softmax(1)
        generator = torch.Generator().manual_seed(evidence.seed)
        _descend(layers, ((inputs - m) * s).float(), target, self.schedule, generator)
        return layers.head(task=support.task)

    def _coordinates(self, head: Head, inputs: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Origin m [d] (float64) and scale s in which the head is trained."""
        first, f = head.hidden or head.output, inputs.double()
        m = torch.zeros_like(f[0])
        if self.recipe == "paper":
            s = float(first.weight.double().norm(dim=1).mean()) if head.normalise else 1.0
            return m, s or 1.0
        if first.bias is not None and len(f) > 1:
            m = f.mean(0)
        norm = float((f - m).square().sum(1).mean().sqrt())
        # Inputs that are all the same (to rounding) have no scale.
        return m, _NORM / norm if norm > 1e-6 * float(f.norm(dim=1).max()) else 1.0


def divergence(teacher: torch.Tensor, student: torch.Tensor) -> float:
    """Mean over inputs of KL(softmax(teacher) || softmax(student)), both logits [n, C]."""
    target, log_p = log_softmax(teacher.double(), 1), log_softmax(student.double(), 1)
    return float(kl_div(log_p, target, reduction="batchmean", log_target=True))


class _Layers:
    """The trainable tensors of a head whose inputs come as s (f - m), already normalised."""

    def __init__(self, head: Head, m: torch.Tensor, s: float) -> None:
        self._like, self._m, self._s = head, m, s
        self._names = ("hidden.weight", "hidden.bias") if head.hidden else ("weight", "bias")
        tensors = {name: tensor.detach().to(m.device, torch.float64) for name, tensor in head.tensors().items()}
        weight, bias = self._names
        if bias in tensors:
            tensors[bias] = tensors[bias] + tensors[weight] @ m
        tensors[weight] = tensors[weight] / s
        self._trained = {
            name: tensor.to(torch.float32, copy=True).requires_grad_(name.startswith("hidden."))
            for name, tensor in tensors.items()
        }

    @property
    def parameters(self) -> list[torch.Tensor]:
        return list(self._trained.values())

    def gradients(self, inputs: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
        """Of the mean divergence from `target` [B, C] (probabilities), in the order of the parameters.

        The output layer's are written out: dKL/dlogits = p - target. At these sizes autograd takes thrice the time.
        """
        tensors, activation = self._trained, self._like.activation
        h = inputs
        if activation is not None:
            hidden = torch.nn.functional.linear(inputs, tensors["hidden.weight"], tensors.get("hidden.bias"))
            h = getattr(torch.nn.functional, activation)(hidden)
        with torch.no_grad():
            logits = torch.nn.functional.linear(h, tensors["weight"], tensors.get("bias"))
            error = logits.softmax(1).sub_(target).div_(len(inputs))
            found = [error.T @ h]
            if "bias" in tensors:
                found.append(error.sum(0))
        if activation is not None:
            found += torch.autograd.grad(h, self.parameters[len(found) :], error @ tensors["weight"])
        return found

    def head(self, *, task: str) -> Head:
        """What was trained, for features as they are."""
        tensors = {name: tensor.detach().double() for name, tensor in self._trained.items()}
        weight, bias = self._names
        tensors[weight] = tensors[weight] * self._s
        if bias in tensors:
            tensors[bias] = tensors[bias] - tensors[weight] @ self._m
        tensors = {name: tensor.float() for name, tensor in tensors.items()}
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise NumericalError(f"the head of {task!r} diverged under aligned-c: it is no longer finite")
        output = Linear(tensors["weight"], tensors.get("bias"))
        hidden = Linear(tensors["hidden.weight"], tensors.get("hidden.bias")) if self._like.hidden else None
        return replace(self._like, output=output, hidden=hidden)


def _descend(
    layers: _Layers, inputs: torch.Tensor, target: torch.Tensor, schedule: Schedule, generator: torch.Generator
) -> None:
    """Adam on the mean divergence of one batch after the other."""
    steps = schedule.steps(len(inputs))
    parameters = layers.parameters
    means, squares = ([torch.zeros_like(parameter) for parameter in parameters] for _ in range(2))
    for step, rows in enumerate(_batches(len(inputs), schedule.batch, steps, generator)):
        places = rows.to(inputs.device)
        gradients = layers.gradients(inputs.index_select(0, places), target.index_select(0, places))
        lr = schedule.lr * (1 + math.cos(math.pi * step / steps)) / 2 if schedule.decay else schedule.lr
        size, root = lr / (1 - _BETA_1 ** (step + 1)), math.sqrt(1 - _BETA_2 ** (step + 1))
        with torch.no_grad():
            for parameter, gradient, mean, square in zip(parameters, gradients, means, squares, strict=True):
                mean.lerp_(gradient, 1 - _BETA_1)
                square.mul_(_BETA_2).addcmul_(gradient, gradient, value=1 - _BETA_2)
                parameter.addcdiv_(mean, square.sqrt().div_(root).add_(_EPSILON), value=-size)


def _batches(count: int, batch: int, steps: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """`steps` batches of row numbers; every epoch goes through all rows in a new order."""
    left = steps
    while left > 0:
        rows = torch.split(torch.randperm(count, generator=generator), batch)[:left]
        yield from rows
        left -= len(rows)
