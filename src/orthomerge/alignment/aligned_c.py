"""The expert's head, fitted to merged features by Adam until its outputs are the expert's.

Kong et al. 2024, "Rethink the Evaluation Protocol of Model Merging on Classification Task" (FT-Classifier), Eq. 8, and
its third version, MOMA, Eq. 12; arXiv 2412.13526. From W' = W, b' = b and on unlabelled inputs x, Adam minimises

    mean over x of KL(softmax(teacher(x)) || softmax(head'(g(x; theta_m)))).

All parameters of the head are trained, those of a hidden layer too. Adam's steps are absolute, so what is trained is
the same head in other coordinates, U = W / s and c = b + W m with logits U (s (f - m)) + c, and folded back:

- `paper`: m = 0, s = 1; for heads that normalise (CLIP, whose weight holds the factor 100) s is the mean norm of W's
  rows, so that U is the unit-norm head of the text tower.
- `tuned`: m = the mean of the head's inputs (0 without a bias), and s such that what is left has norm 20 (root mean
  square). The result does not depend on the features' unit, nor, with a bias, on their origin, and it converges:
  features share a large mean, along which Adam would need many steps.

Letters: f [n, d] merged features, normalised where the head does so; m [d]; W, U [C, d]; b, c [C]; teacher [n, C].
Differs from the paper: `paper` is the authors' code for BERT (5 epochs, lr 5e-4, one input per step) without the
dropout of their frozen encoder; `tuned`, the default, is trained until it converges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch.nn.functional import normalize

from orthomerge.alignment.aligners import Alignment
from orthomerge.alignment.descent import Descent, require_finite
from orthomerge.alignment.folding import first_map, logits_from
from orthomerge.alignment.problem import Problem
from orthomerge.core.checks import at_least_one
from orthomerge.core.errors import RecipeError, nearest
from orthomerge.models.features import FeaturePair
from orthomerge.models.heads import Head

Recipe = Literal["paper", "tuned"]

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
    seed: int = 0

    def __post_init__(self) -> None:
        if self.recipe not in _RECIPES:
            hint = nearest(self.recipe, get_args(Recipe))
            raise RecipeError(f"'recipe' must be 'paper' or 'tuned', got {self.recipe!r}; {hint}")
        at_least_one(epochs=self.epochs, batch=self.batch, most=self.most)
        self._descent(1)

    @property
    def schedule(self) -> Schedule:
        """The recipe with what was overridden."""
        options = {name: getattr(self, name) for name in ("epochs", "lr", "batch", "most")}
        schedule = _RECIPES[self.recipe]
        return replace(schedule, **{name: value for name, value in options.items() if value is not None})

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        """Facts: the mean divergence from the expert's outputs under the old head and the new."""
        problem = Problem.of(pair, head)
        aligned = self.distil(pair.merged.values, problem.Z, head, task=problem.task)
        before, after = (problem.divergence(logits_from(each, problem.H)) for each in (head, aligned))
        return Alignment(aligned, {"loss_before": before, "loss": after, "steps": self.schedule.steps(len(problem.H))})

    def distil(self, features: torch.Tensor, teacher: torch.Tensor, head: Head, *, task: str) -> Head:
        """The head fitted to merged features [n, d] and the expert's logits [n, C] on the same inputs."""
        values = features.float()
        inputs = normalize(values, dim=-1) if head.normalise else values
        m, s = self._coordinates(head, inputs)
        layers = _Layers(head, m, s)
        x, target = ((inputs - m) * s).float(), teacher.to(inputs.device, torch.float32).softmax(1)
        name = f"the head of {task!r} diverged under aligned-c"
        self._descent(len(x)).minimise(
            layers.parameters,
            lambda rows: layers.gradients(x.index_select(0, rows), target.index_select(0, rows)),
            count=len(x),
            name=name,
        )
        aligned = layers.head()
        require_finite(aligned.tensors().values(), name=name)
        return aligned

    def _descent(self, count: int) -> Descent:
        schedule = self.schedule
        return Descent(schedule.steps(count), schedule.lr, schedule.batch, schedule.decay, self.seed)

    def _coordinates(self, head: Head, inputs: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Origin m [d] (float64) and scale s in which the head is trained."""
        first, f = first_map(head), inputs.double()
        m = torch.zeros_like(f[0])
        if self.recipe == "paper":
            s = float(first.weight.double().norm(dim=1).mean()) if head.normalise else 1.0
            return m, s or 1.0
        if first.bias is not None and len(f) > 1:
            m = f.mean(0)
        norm = float((f - m).square().sum(1).mean().sqrt())
        # Inputs that are all the same (to rounding) have no scale.
        return m, _NORM / norm if norm > 1e-6 * float(f.norm(dim=1).max()) else 1.0


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
        """Gradients of the mean divergence from `target` [B, C] (probabilities): dKL/dlogits = p - target."""
        tensors, activation = self._trained, self._like.activation
        h = inputs
        if activation is not None:
            hidden = torch.nn.functional.linear(inputs, tensors["hidden.weight"], tensors.get("hidden.bias"))
            h = getattr(torch.nn.functional, activation)(hidden)
        with torch.no_grad():
            logits = torch.nn.functional.linear(h, tensors["weight"], tensors.get("bias"))
            error = logits.softmax(1).sub_(target).div_(len(inputs))
            gradients = [error.T @ h]
            if "bias" in tensors:
                gradients.append(error.sum(0))
        if activation is not None:
            gradients += torch.autograd.grad(h, self.parameters[len(gradients) :], error @ tensors["weight"])
        return gradients

    def head(self) -> Head:
        """The trained head in the coordinates of the features."""
        tensors = {name: tensor.detach().double() for name, tensor in self._trained.items()}
        weight, bias = self._names
        tensors[weight] = tensors[weight] * self._s
        if bias in tensors:
            tensors[bias] = tensors[bias] - tensors[weight] @ self._m
        return self._like.with_tensors({name: tensor.float() for name, tensor in tensors.items()})
