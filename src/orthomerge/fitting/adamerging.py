"""AdaMerging: one coefficient a task, or a task and tensor, that makes predictions on unlabelled inputs sure.

Yang et al., "AdaMerging: Adaptive Model Merging for Multi-Task Learning", ICLR 2024, arXiv 2310.02575.

    theta = theta_b + sum_t lambda_t^l tau_t^l,    min over lambda of the entropy of softmax(logits), summed over tasks

Layer-wise means tensor-wise, as in the authors' code. `vectors = ties` is AdaMerging++: task vectors that were trimmed
and of which only the elements with the elected sign are left.

Differs from the authors' code: a step sees one batch of 2 `batch` inputs of every task, where theirs adds up the
gradients of two batches of 16; inputs are those given, not necessarily the test split's. Their clamp to [0, 1] is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from orthomerge.core.errors import RecipeError
from orthomerge.fitting.coefficients import Coefficients
from orthomerge.fitting.entropy import Entropy
from orthomerge.fitting.kinds import Fitted
from orthomerge.fitting.loop import Loop, check_loop, divided
from orthomerge.fitting.starts import elected_vectors, task_vectors

if TYPE_CHECKING:
    from orthomerge.fitting.kinds import Setting


@dataclass(frozen=True)
class AdaMerging:
    """`by`: layer (one coefficient a task and tensor) or task. `start`: every coefficient at first.

    `clamp`: keep coefficients within 0 and 1, as the authors' code does and FusionBench does not.
    """

    by: Literal["layer", "task"] = "layer"
    vectors: Literal["plain", "ties"] = "plain"
    density: float = 0.2
    start: float = 0.3
    clamp: bool = True
    steps: int = 500
    batch: int = 16
    lr: float = 1e-3
    hold_out: float = 0.0
    look: int = 50

    def __post_init__(self) -> None:
        check_loop(steps=self.steps, batch=self.batch, lr=self.lr, hold_out=self.hold_out)
        if not 0 < self.density <= 1:
            raise RecipeError(f"'density' must be above 0 and at most 1, got {self.density}")

    def fit(self, setting: Setting) -> Fitted:
        vectors = task_vectors(setting)
        if self.vectors == "ties":
            vectors = elected_vectors(setting, vectors, self.density)
        inputs, held = divided(setting.inputs, self.hold_out, seed=setting.seed)
        gates = Coefficients(
            setting.base.to(setting.device),
            vectors,
            setting.layout,
            groups="tensor" if self.by == "layer" else "encoder",
            start=self.start,
            lr=self.lr,
            bounds=(0.0, 1.0) if self.clamp else None,
        )
        objective = Entropy(setting.heads, inputs)
        loop = Loop(steps=self.steps, batch=2 * self.batch, cosine=False, look=self.look)
        course = loop.run(setting, gates, objective, held)
        facts = {"trained": gates.size, "coefficients": coefficient_table(setting, gates)}
        return Fitted(setting.encoder.weights.cpu().clone(), setting.heads, facts, tuple(course.rows))


def coefficient_table(setting: Setting, gates: Coefficients) -> dict[str, Any]:
    """By task: its coefficient, or one a tensor."""
    rows = dict(zip(setting.tasks, gates.clamped().tolist(), strict=True))
    if gates.groups == 1:
        return {task: values[0] for task, values in rows.items()}
    return {task: dict(zip(setting.layout.shapes, values, strict=True)) for task, values in rows.items()}
