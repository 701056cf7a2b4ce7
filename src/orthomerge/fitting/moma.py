"""MOMA: a mask over the merged task vector and an orthogonal map of each task's features, trained together.

Kong et al. 2026, "MOMA: Masked Orthogonal Matrix Alignment for Zero-Additional-Parameter Model Merging", arXiv
2412.13526 v3, Eq. 10:

    min over S, A_t   sum_t mean_x || A_t g(x; theta_b + sigma(S) * delta) - g(x; theta_t) ||
                      + alpha sum_t || A_t^T A_t - I ||  +  decay sum sigma(S)^2

with Adam, on unlabelled inputs. delta is the vector of a merge with its scale (`start`: average, task_arithmetic or
ties_sum, as the paper's three; any merge without data will do). The mask goes into the weights and A_t into the head,
W_t A_t, so that nothing is added to the model.

The paper gives Adam, the mask's learning rate 0.1, "L2 regularization weight 5e-9", A's 1e-3 with batches of 16
(images) or 5e-4 with 24 (text); masking rates between 10 % and 90 %. It does not give alpha, the starts, the number of
steps, the norms, or what is done with A and S at the end. Ours: alpha 1, A = I, S = 0, 500 steps, rates that fall along
a cosine, Euclidean norms that are not squared, 5e-9 on the sum of the squared mask, a soft mask, and the nearest
orthogonal matrix in the place of A. Facts give the held-out loss of all four ways of ending: mask soft or hard, A
projected or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from orthomerge.core.errors import RecipeError
from orthomerge.fitting.distance import FeatureDistance, Norm, Penalty, Transform
from orthomerge.fitting.gates import Fixed, Form, Gates, Mask
from orthomerge.fitting.loop import Loop, check_loop, held_out_loss
from orthomerge.fitting.setting import Fitted

if TYPE_CHECKING:
    from orthomerge.fitting.inputs import Inputs
    from orthomerge.fitting.setting import Setting


@dataclass(frozen=True)
class Moma:
    """`start`, `options`: the merge whose vector is masked. `transform`: none, orthogonal, similarity or linear.

    `mask`: soft, hard, or none at all (the paper's ablation). `cap`: how far beyond the merge an element may grow (the
    paper: 1, not at all). `project`: end with orthogonal matrices. `hold_out`: share of the inputs that is held out.
    """

    start: str = "task_arithmetic"
    options: dict[str, Any] = field(default_factory=dict)
    transform: Transform = "orthogonal"
    mask: Literal["soft", "hard", "none"] = "soft"
    cap: float = 1.0
    steps: int = 500
    batch: int = 16
    lr: float = 0.1
    map_lr: float = 1e-3
    alpha: float = 1.0
    norm: Norm = "l2"
    penalty: Penalty = "fro"
    decay: float = 5e-9
    project: bool = True
    hold_out: float = 0.1
    look: int = 50
    checkpointing: bool = False

    def __post_init__(self) -> None:
        check_loop(steps=self.steps, batch=self.batch, lr=self.lr, hold_out=self.hold_out)
        if self.cap < 1:
            raise RecipeError(f"'cap' must be at least 1, got {self.cap}; a mask below it is what is trained")
        if min(self.alpha, self.decay) < 0 or self.map_lr <= 0:
            raise RecipeError("'alpha' and 'decay' must be at least 0, and 'map_lr' positive")
        if self.mask == "none" and self.transform == "none":
            raise RecipeError("with neither a mask nor a transform there is nothing to fit; set one of them")

    def fit(self, setting: Setting) -> Fitted:
        inputs, held = setting.inputs.divided(self.hold_out, seed=setting.seed)
        gates = self._gates(setting)
        objective = FeatureDistance(
            setting.heads,
            inputs,
            transform=self.transform,
            norm=self.norm,
            penalty=self.penalty,
            alpha=self.alpha,
            lr=self.map_lr,
        )
        loop = Loop(steps=self.steps, batch=self.batch, look=self.look, checkpointing=self.checkpointing)
        course = loop.run(setting, gates, objective, inputs, held)
        trained = gates.size + sum(parameter.numel() for parameter in objective.parameters)
        facts: dict[str, Any] = {**gates.measures(), **objective.measures(), "trained": trained}
        facts["ends"] = self._ends(setting, gates, objective, held)
        gates.write(setting.encoder.weights)
        return Fitted(setting.encoder.weights.cpu().clone(), objective.classifiers(), facts, tuple(course.rows))

    def _gates(self, setting: Setting) -> Gates:
        base, delta = setting.base.to(setting.device), setting.start_vector(self.start, self.options)
        if self.mask == "none":
            return Fixed(base + delta)
        return Mask(base, delta, cap=self.cap, lr=self.lr, decay=self.decay, form=self.mask)

    def _ends(
        self, setting: Setting, gates: Gates, objective: FeatureDistance, held: Inputs | None
    ) -> dict[str, float]:
        """The held-out loss of every way of ending; leaves the maps as `project` says."""
        losses: dict[str, float] = {}
        writers: dict[str, Callable[[torch.Tensor], None]] = {"unmasked": gates.write}
        if isinstance(gates, Mask):
            writers = {form: partial(gates.write_as, form=form) for form in get_args(Form)}
        orthogonal = self.transform in ("orthogonal", "similarity")
        before = {task: A.detach().clone() for task, A in objective.maps.items()}
        for projected in (False, True) if orthogonal else (False,):
            if projected:
                objective.project()
            for name, write in writers.items():
                write(setting.encoder.weights)
                if held is not None:
                    losses[f"{name}, projected" if projected else name] = held_out_loss(setting, objective, held)
        if orthogonal and not self.project:
            with torch.no_grad():
                for task, A in objective.maps.items():
                    A.copy_(before[task])
        return losses
