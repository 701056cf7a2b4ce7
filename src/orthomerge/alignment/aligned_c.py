"""Fit the expert's head to merged features by Adam, so that its outputs become the expert's.

Kong et al. 2024, "Rethink the Evaluation Protocol of Model Merging on Classification Task" (FT-Classifier), Eq. 8, and
its third version, MOMA, Eq. 12; arXiv 2412.13526. From the expert's head and on unlabelled inputs x, Adam minimises

    mean over x of KL(softmax(teacher(x)) || softmax(head'(g(x; theta_m)))).

Adam's steps do not depend on the scale of the parameters, so the head is trained in other coordinates, U = W / s and
c = b + W m with logits U (s (f - m)) + c, and folded back:

- `paper`: m = 0, s = 1; for heads that normalise (CLIP, whose weight holds the factor 100) s is the mean norm of W's
  rows, so that U is the unit-norm head of the text tower.
- `tuned`: m = the mean of the head's inputs (0 without a bias), s such that the centred inputs have norm 20 (rms).

Letters: f [n, d] merged features, normalised where the head does so; m [d]; W, U [C, d]; b, c [C]; teacher [n, C].
Differs from the paper: `paper` is the authors' code for BERT (5 epochs, lr 5e-4, one input per step) without the
dropout of their frozen encoder; `tuned`, the default, is trained until it converges.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.functional import normalize

from orthomerge.alignment.aligners import Alignment
from orthomerge.alignment.descent import Descent, require_finite
from orthomerge.alignment.folding import first_map, logits_from, with_first_map
from orthomerge.alignment.problem import Problem
from orthomerge.core.checks import at_least_one, choices
from orthomerge.models.features import FeaturePair
from orthomerge.models.heads import Head

_NORM = 20.0  # root mean square of the inputs in the coordinates of `tuned`
_RECIPES: Mapping[str, Mapping[str, Any]] = {
    "paper": {"epochs": 5, "lr": 5e-4, "batch": 1, "most": None, "decay": False},
    "tuned": {"epochs": 60, "lr": 5e-3, "batch": 64, "most": 3000, "decay": True},
}


@dataclass(frozen=True)
class AlignedC:
    """`recipe` sets everything; `epochs`, `lr`, `batch` and `most` (steps) override it if they are set."""

    recipe: Literal["paper", "tuned"] = "tuned"
    epochs: int | None = None
    lr: float | None = None
    batch: int | None = None
    most: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        choices(self)
        at_least_one(epochs=self.epochs, batch=self.batch, most=self.most)
        self.descent(1)

    def descent(self, count: int) -> Descent:
        own = {name: getattr(self, name) for name in ("epochs", "lr", "batch", "most")}
        options = {**_RECIPES[self.recipe], **{name: value for name, value in own.items() if value is not None}}
        steps = options["epochs"] * math.ceil(count / options["batch"])
        steps = min(steps, options["most"] or steps)
        return Descent(steps, options["lr"], options["batch"], options["decay"], self.seed)

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        """Facts: the mean divergence from the expert's outputs under the old head and the new."""
        problem = Problem.of(pair, head)
        aligned = self.distil(pair.merged.values, problem.Z, head, task=problem.task)
        before, after = (problem.divergence(logits_from(reader, problem.H)) for reader in (head, aligned))
        facts = {"loss_before": before, "loss": after, "steps": self.descent(len(problem.H)).steps}
        return Alignment(aligned, facts)

    def distil(self, features: torch.Tensor, teacher: torch.Tensor, head: Head, *, task: str) -> Head:
        """Fit the head to merged features [n, d] and the expert's logits [n, C] of the same inputs."""
        inputs = normalize(features.float(), dim=-1) if head.normalise else features.float()
        m, s = self._coordinates(head, inputs)
        x, target = ((inputs - m) * s).float(), teacher.to(inputs.device, torch.float32).softmax(1)
        wide = head.to(torch.float64)
        W, b = first_map(wide).weight, first_map(wide).bias
        inner = with_first_map(wide, W / s, None if b is None else b + W @ m, task=task).to(torch.float32)
        name = f"the head of {task!r} diverged under aligned-c"
        self.descent(len(x)).minimise(
            list(inner.tensors().values()),
            lambda rows: _gradients(inner, x.index_select(0, rows), target.index_select(0, rows)),
            count=len(x),
            name=name,
        )
        wide = inner.to(torch.float64)
        W, b = first_map(wide).weight * s, first_map(wide).bias
        aligned = with_first_map(wide, W, None if b is None else b - W @ m, task=task).to(torch.float32)
        require_finite(aligned.tensors().values(), name=name)
        return aligned

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
        # Equal inputs (to rounding) have no scale.
        return m, _NORM / norm if norm > 1e-6 * float(f.norm(dim=1).max()) else 1.0


def _gradients(head: Head, inputs: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of the mean KL from `target` [B, C] (probabilities) in `head.tensors()`; dKL/dlogits = p - target."""
    features, hidden = inputs, list[torch.Tensor]()
    if head.hidden is not None and head.activation is not None:
        hidden = [tensor.requires_grad_() for tensor in (head.hidden.weight, head.hidden.bias) if tensor is not None]
        features = getattr(torch.nn.functional, head.activation)(head.hidden(inputs))
    with torch.no_grad():
        error = head.output(features).softmax(1).sub_(target).div_(len(inputs))
        gradients = [error.T @ features]
        if head.output.bias is not None:
            gradients.append(error.sum(0))
    if hidden:
        gradients += torch.autograd.grad(features, hidden, error @ head.output.weight)
    return gradients
