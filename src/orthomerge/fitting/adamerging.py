"""AdaMerging: one coefficient per task, or per task and tensor, fitted for confident predictions on unlabelled inputs.

Yang et al., "AdaMerging: Adaptive Model Merging for Multi-Task Learning", ICLR 2024, arXiv 2310.02575.

    theta = theta_b + sum_t lambda_t^l tau_t^l,    min over lambda of the entropy of softmax(logits), summed over tasks

Layer-wise means tensor-wise, as in the authors' code. `vectors = ties` (AdaMerging++) trims task vectors and elects.

Differs from the authors' code: a step sees one batch of 2 `batch` inputs of every task, where theirs adds up the
gradients of two batches of 16; inputs are the caller's, not necessarily the test split's.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from orthomerge.core.checks import fraction
from orthomerge.fitting.gates import Coefficients
from orthomerge.fitting.loop import Loop, check_loop
from orthomerge.fitting.objective import Entropy
from orthomerge.fitting.setting import Fitted, Setting


@dataclass(frozen=True)
class AdaMerging:
    """`by`: layer (one coefficient per task and tensor) or task. `start`: initial value of every coefficient.

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
        fraction(density=self.density)

    def fit(self, setting: Setting) -> Fitted:
        vectors = setting.task_vectors()
        if self.vectors == "ties":
            vectors = elected(vectors, self.density, elements=setting.layout.elements)
        inputs, held = setting.inputs.divided(self.hold_out, seed=setting.seed)
        gates = Coefficients(
            setting.base.to(setting.device),
            vectors,
            setting.layout,
            by_tensor=self.by == "layer",
            start=self.start,
            lr=self.lr,
            clamp=self.clamp,
        )
        loop = Loop(steps=self.steps, batch=2 * self.batch, cosine=False, look=self.look)
        course = loop.run(setting, gates, Entropy(setting.heads, setting.device), inputs, held)
        facts = {"trained": gates.size, "coefficients": coefficient_table(setting, gates)}
        return Fitted(setting.encoder.weights.cpu().clone(), setting.heads, facts, tuple(course.rows))


def coefficient_table(setting: Setting, gates: Coefficients) -> dict[str, Any]:
    """Return the coefficients by task: one number, or one per tensor."""
    rows = dict(zip(setting.tasks, gates.clamped().tolist(), strict=True))
    if gates.values.shape[1] == 1:
        return {task: values[0] for task, values in rows.items()}
    return {task: dict(zip(setting.layout.shapes, values, strict=True)) for task, values in rows.items()}


def elected(vectors: torch.Tensor, density: float, *, elements: int) -> torch.Tensor:
    """Trim task vectors [T, P] to a share of their `elements`, and zero those without the elected sign."""
    kept = max(int(density * elements), 1)
    trimmed = torch.empty_like(vectors)
    for number, vector in enumerate(vectors):
        size = vector.abs()
        limit = size.kthvalue(len(size) - kept + 1).values
        trimmed[number] = vector * (size >= limit)
    sign = torch.copysign(torch.ones((), device=vectors.device), trimmed.sum(0))
    return trimmed.mul_(trimmed * sign > 0)
