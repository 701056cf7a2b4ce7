"""Fisher merging: average the experts, each weight weighted by the Fisher information of each expert.

Matena and Raffel, "Merging Models with Fisher-Weighted Averaging", 2022, arXiv 2111.09832.

    theta = sum_t c_t F_t theta_t / sum_t c_t F_t,    F_t = E_x E_{y ~ p_t(y|x)} (d log p_t(y|x) / d theta)^2

element by element, with labels drawn from the expert's predictions. With the logits z of one input, the inner mean is
sum_k (d <v_k, z> / d theta)^2 for any v_k with sum_k v_k v_k^T = diag(p) - p p^T. Its eigenvectors give C - 1
backward passes; if that is more than `samples`, v_k = (e_y - p) / sqrt(samples) with y ~ p.

Letters: T experts; theta, F_t [P]; C classes; p, z, v_k [C].
Differs from the paper: where the sum of all Fishers is below `floor` times its mean (tokens that no input has), the
plain average is taken; the absolute floor of the paper's code can exceed every Fisher of a confident expert. Gradients
are squared per input, not per batch.
"""

import math
from dataclasses import dataclass

import torch

from orthomerge.core.checks import at_least_one, finite, not_negative
from orthomerge.core.errors import NumericalError, RecipeError
from orthomerge.fitting.objective import on_device
from orthomerge.fitting.setting import Fitted, Inputs, Setting
from orthomerge.merging.elect import per_expert
from orthomerge.models.heads import Head

_NOTHING = 1e-9  # share of the largest eigenvalue below which eigenvectors are left out


@dataclass(frozen=True)
class Fisher:
    """`inputs`: number per task. `samples`: most passes per input. `weights`: c, one per expert; equal by default.

    `floor`: share of the mean Fisher below which a weight is averaged. `normalise`: scale every F_t to norm one.
    """

    inputs: int = 256
    samples: int = 8
    floor: float = 1e-6
    normalise: bool = True
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        at_least_one(inputs=self.inputs, samples=self.samples)
        not_negative(floor=self.floor)
        if self.weights is not None:
            finite(weights=self.weights)
            if min(self.weights, default=0.0) < 0 or not any(self.weights):
                raise RecipeError(f"'weights' must be at least 0 and not all 0, got {list(self.weights)}")

    def fit(self, setting: Setting) -> Fitted:
        shares = per_expert(1.0 if self.weights is None else self.weights, len(setting.tasks))
        inputs = setting.drawn(self.inputs)
        # As differences to the first expert, so that equal experts are returned to the bit.
        first = setting.tuned(setting.tasks[0])
        total, moved, mean = torch.zeros_like(first), torch.zeros_like(first), torch.zeros_like(first)
        norms = {}
        for task, share in zip(setting.tasks, shares, strict=True):
            setting.say(f"Fisher information: {task}")
            expert = setting.tuned(task)
            head = on_device(setting.heads[task], setting.device)
            F = fisher_of(setting, inputs, task, expert, head, self.samples).cpu()
            norms[task] = float(torch.linalg.vector_norm(F, dtype=torch.float64))
            F *= share / norms[task] if self.normalise and norms[task] > 0 else share
            expert -= first
            total += F
            moved.addcmul_(F, expert)
            mean.add_(expert, alpha=1 / len(setting.tasks))
        elements = setting.layout.elements
        weighted = total > self.floor * float(total.double().sum()) / elements
        weights = first + torch.where(weighted, moved / total, mean)
        return Fitted(weights, setting.heads, {"norms": norms, "averaged": 1 - int(weighted.sum()) / elements})


def fisher_of(
    setting: Setting, inputs: Inputs, task: str, weights: torch.Tensor, head: Head, samples: int
) -> torch.Tensor:
    """Diagonal of the Fisher information of an expert on a task's inputs, [P] on the device."""
    encoder, random = setting.encoder, torch.Generator().manual_seed(setting.seed)
    encoder.load(weights)
    encoder.gradient.zero_()
    total = torch.zeros_like(encoder.gradient)
    with torch.enable_grad():
        for targets, batch in inputs.batches(task, 1):
            weight = float(targets.weights)
            logits = head(encoder.features(batch))[0]
            rows = directions(logits.detach(), samples, random).to(logits)
            for left, row in zip(range(len(rows) - 1, -1, -1), rows, strict=True):
                torch.autograd.backward(logits, row, retain_graph=left > 0)
                total.addcmul_(encoder.gradient, encoder.gradient, value=weight)
                encoder.gradient.zero_()
    total /= len(inputs.targets[task])
    if not torch.isfinite(total).all():
        name = next(name for name, view in setting.layout.views(total) if not torch.isfinite(view).all())
        raise NumericalError(f"the Fisher information of task {task!r} is not finite in {name!r}; check its expert")
    return total


def directions(logits: torch.Tensor, samples: int, random: torch.Generator) -> torch.Tensor:
    """Rows v_k [r, C] with sum_k v_k v_k^T = diag(p) - p p^T, exactly or in the mean, on the CPU."""
    p = logits.double().cpu().softmax(0)
    if not torch.isfinite(p).all():
        return p[None]  # gives a gradient that is not finite, which the caller refuses
    if len(p) - 1 <= samples:
        values, vectors = torch.linalg.eigh(torch.diag(p) - torch.outer(p, p))
        kept = values > _NOTHING * values[-1].clamp_min(0)
        exact: torch.Tensor = (vectors[:, kept] * values[kept].sqrt()).T
        return exact
    labels = torch.multinomial(p, samples, replacement=True, generator=random)
    drawn: torch.Tensor = (torch.eye(len(p), dtype=p.dtype)[labels] - p) / math.sqrt(samples)
    return drawn
