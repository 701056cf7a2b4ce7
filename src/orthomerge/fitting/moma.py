"""MOMA: train a mask over the merged task vector and an orthogonal map of each task's features together.

Kong et al. 2026, "MOMA: Masked Orthogonal Matrix Alignment for Zero-Additional-Parameter Model Merging", arXiv
2412.13526 v3, Eq. 10:

    min over S, A_t   sum_t mean_x || A_t g(x; theta_b + sigma(S) * delta) - g(x; theta_t) ||
                      + alpha sum_t || A_t^T A_t - I ||  +  decay sum sigma(S)^2

with Adam, on unlabelled inputs. delta is the scaled vector of a merge without data (`start`; the paper's are average,
task_arithmetic and ties_sum). The mask is folded into the weights and A_t into the head, W_t A_t.

Differs from the paper, which gives Adam, the mask's learning rate 0.1, "L2 regularization weight 5e-9", A's 1e-3 with
batches of 16 (images) or 5e-4 with 24 (text). Ours: alpha 1, A = I and S = 0 at first, 500 steps along a cosine, norms
that are not squared, 5e-9 on the sum of the squared mask, a soft mask, and A replaced by the nearest orthogonal matrix.

Letters: A_t [d, d]; features g(x; theta) [n, d] under the weights theta; S, delta, theta [P].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch.nn.functional import normalize

from orthomerge.alignment.folding import folded
from orthomerge.alignment.rigid import polar_factor
from orthomerge.alignment.trained_maps import excess
from orthomerge.core.checks import not_negative, positive
from orthomerge.core.errors import RecipeError
from orthomerge.fitting.gates import Fixed, Form, Gates, Mask
from orthomerge.fitting.loop import Loop, check_loop, held_out_loss
from orthomerge.fitting.objective import Objective
from orthomerge.fitting.setting import Fitted, Inputs, Setting, Targets
from orthomerge.models.heads import Classifier, Head

_TINY = 1e-24  # added under roots, which have no gradient at zero


@dataclass(frozen=True)
class Moma:
    """`start`, `options`: the merge whose vector is masked. `transform`: none, orthogonal, similarity or linear.

    `mask`: soft, hard, or none (the paper's ablation). `cap`: largest factor of an element of the vector (the paper:
    1). `project`: end with orthogonal matrices. `hold_out`: share of held-out inputs.
    """

    start: str = "task_arithmetic"
    options: dict[str, Any] = field(default_factory=dict)
    transform: Literal["none", "orthogonal", "similarity", "linear"] = "orthogonal"
    mask: Literal["soft", "hard", "none"] = "soft"
    cap: float = 1.0
    steps: int = 500
    batch: int = 16
    lr: float = 0.1
    map_lr: float = 1e-3
    alpha: float = 1.0
    norm: Literal["l2", "l1", "mse"] = "l2"
    penalty: Literal["fro", "fro2", "l1"] = "fro"
    decay: float = 5e-9
    project: bool = True
    hold_out: float = 0.1
    look: int = 50
    checkpointing: bool = False

    def __post_init__(self) -> None:
        check_loop(steps=self.steps, batch=self.batch, lr=self.lr, hold_out=self.hold_out)
        if self.cap < 1:
            raise RecipeError(f"'cap' must be at least 1, got {self.cap}; the mask itself makes elements smaller")
        not_negative(alpha=self.alpha, decay=self.decay)
        positive(map_lr=self.map_lr)
        if self.mask == "none" and self.transform == "none":
            raise RecipeError("with neither a mask nor a transform there is nothing to fit; set one of them")

    def fit(self, setting: Setting) -> Fitted:
        inputs, held = setting.inputs.divided(self.hold_out, seed=setting.seed)
        gates = self._gates(setting)
        objective = FeatureDistance(setting.heads, inputs, self)
        loop = Loop(steps=self.steps, batch=self.batch, look=self.look, checkpointing=self.checkpointing)
        course = loop.run(setting, gates, objective, inputs, held)
        trained = gates.size + sum(parameter.numel() for parameter in objective.parameters)
        facts: dict[str, Any] = {**gates.measures(), **objective.measures(), "trained": trained}
        if isinstance(gates, Mask):
            facts["masked_by_tensor"] = gates.masked_by_tensor(setting.layout)
        facts["ends"] = self._ends(setting, gates, objective, held)
        gates.write(setting.encoder.weights)
        return Fitted(setting.encoder.weights.cpu().clone(), objective.classifiers(), facts, tuple(course.rows))

    def _gates(self, setting: Setting) -> Gates:
        base, delta = setting.base.to(setting.device), setting.start_vector(self.start, self.options)
        if self.mask == "none":
            return Fixed(base + delta)
        return Mask(base, delta, cap=self.cap, lr=self.lr, penalty=self.decay, form=self.mask)

    def _ends(
        self, setting: Setting, gates: Gates, objective: FeatureDistance, held: Inputs | None
    ) -> dict[str, float]:
        """Return the held-out loss with soft and hard mask, A projected or not; project A if `project` is set."""
        writers: dict[str, Callable[[torch.Tensor], None]] = {"unmasked": gates.write}
        if isinstance(gates, Mask):
            writers = {form: partial(gates.write_as, form=form) for form in get_args(Form)}
        losses: dict[str, float] = {}

        def measure(suffix: str) -> None:
            for name, write in writers.items():
                if held is not None:
                    write(setting.encoder.weights)
                    losses[name + suffix] = held_out_loss(setting, objective, held)

        measure("")
        if self.transform in ("orthogonal", "similarity"):
            before = {task: A.detach().clone() for task, A in objective.maps.items()}
            objective.project()
            measure(", projected")
            if not self.project:
                for task, A in objective.maps.items():
                    A.data.copy_(before[task])
        return losses


class FeatureDistance(Objective):
    """Distance of mapped features from the expert's, with a penalty for maps that are not orthogonal.

    `norm` is of an input's difference: l2 (Euclidean, as Eq. 10 reads), l1 (mean over features, Surgery's code) or mse.
    `penalty` is of A^T A - I: fro (Frobenius), fro2 (its square) or l1 (sum; FT-Classifier). A `similarity` is a factor
    times an orthogonal map; a `linear` map has no penalty. If a head normalises (CLIP), features are scaled to the mean
    norm of the expert's, so that alpha has the same effect.

    `maps`: A by task; `factors`: logarithms of the factors of similarities, by task.
    """

    def __init__(self, heads: Mapping[str, Head], inputs: Inputs, options: Moma) -> None:
        super().__init__(heads, lr=options.map_lr)
        self._options = options
        features = {task: inputs.targets[task].features for task in heads}
        self._lengths = {task: features[task].norm(dim=1).mean() for task, head in heads.items() if head.normalise}
        self.maps = {task: torch.eye(own.shape[1], device=own.device) for task, own in features.items()}
        self.factors = {task: torch.zeros((), device=own.device) for task, own in features.items()}
        if options.transform != "none":
            self.parameters += (A.requires_grad_() for A in self.maps.values())
        if options.transform == "similarity":
            self.parameters += (factor.requires_grad_() for factor in self.factors.values())

    def terms(self, features: torch.Tensor, targets: Targets, task: str) -> torch.Tensor:
        mapped, target = self._scaled(features, task), self._scaled(targets.features, task)
        if self._options.transform != "none":
            mapped = mapped @ self.maps[task].T
        if self._options.transform == "similarity":
            mapped = mapped * self.factors[task].exp()
        gap = mapped - target
        if self._options.norm == "l2":
            return (gap.square().sum(-1) + _TINY).sqrt()
        return gap.abs().mean(-1) if self._options.norm == "l1" else gap.square().mean(-1)

    def penalty(self) -> torch.Tensor | None:
        if self._options.transform in ("none", "linear") or not self._options.alpha:
            return None
        return self._options.alpha * torch.stack([self._size(excess(A)) for A in self.maps.values()]).sum()

    def classifiers(self) -> dict[str, Classifier]:
        """Fold the maps into the heads: W' = W A."""
        if self._options.transform == "none":
            return dict(self._heads)
        maps = {task: A.detach().double() * self.factors[task].detach().double().exp() for task, A in self.maps.items()}
        return {task: folded(head, maps[task].cpu(), task=task) for task, head in self._heads.items()}

    def measures(self) -> dict[str, float]:
        if self._options.transform == "none":
            return {}
        with torch.no_grad():
            return {"defect": float(torch.stack([excess(A).norm() for A in self.maps.values()]).mean())}

    @torch.no_grad()
    def project(self) -> None:
        for task, A in self.maps.items():
            A.copy_(polar_factor(A.double().cpu(), task=task))

    def _scaled(self, features: torch.Tensor, task: str) -> torch.Tensor:
        return normalize(features, dim=-1) * self._lengths[task] if task in self._lengths else features

    def _size(self, S: torch.Tensor) -> torch.Tensor:
        if self._options.penalty == "l1":
            return S.abs().sum()
        squares = S.square().sum()
        return squares if self._options.penalty == "fro2" else (squares + _TINY).sqrt()
