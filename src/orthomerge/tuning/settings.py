"""Settings of fine-tuning, the schema of a recipe's `tuning`; they are recorded in the expert's config.

The defaults suit small encoders. The published CLIP experts were made with AdamW, lr 1e-5, weight decay 0.1, batch 128,
warm-up then cosine, gradients clipped at 1, head frozen (Ilharco et al. 2023, arXiv 2212.04089).
"""

from dataclasses import dataclass
from typing import Literal

from orthomerge.core.checks import at_least_one, fraction, not_negative, positive
from orthomerge.core.errors import RecipeError

Mode = Literal["full", "head_first", "frozen_head", "lora", "linearised", "tau_jp"]
Augment = Literal["none", "shift"]
LINEARISED: tuple[Mode, ...] = ("linearised", "tau_jp")  # trained and evaluated as linear models
PROBED: tuple[Mode, ...] = ("head_first", *LINEARISED)  # the head alone is trained first
_FASTEST = 1000.0  # a learning rate; far below where torch overflows, far above any use


@dataclass(frozen=True)
class Tuning:
    """Settings of a run.

    `epochs` may be a fraction, `steps` caps them. `lr` is the encoder's, `head_lr` the head's; with `head_first` both
    train at `lr` after the head's own phase of `head_epochs` (also of `linearised` and `tau_jp`). `warmup`: share of
    the steps in which the rate rises; then it falls along a cosine. `clip`: largest norm of a gradient, 0 for no limit.
    `rank`, `alpha`, `lora_dropout`: of `lora`. `penalty`, `penalty_batch`: weight of ||J(x') tau|| and inputs of
    another task per step, of `tau_jp`. `pooling`: None for the family's own. `max_length`: tokens per text. `augment`:
    shift moves every training image by up to an eighth of its side, except in the head's own phase. `precision`:
    bfloat16 is autocast on a GPU; a CPU computes in float32.
    """

    mode: Mode = "full"
    epochs: float = 3.0
    batch: int = 64
    lr: float = 1e-4
    head_lr: float = 1e-3
    weight_decay: float = 0.01
    warmup: float = 0.06
    clip: float = 1.0
    seed: int = 0
    max_length: int = 128
    head_epochs: float = 1.0
    rank: int = 16
    alpha: float = 16.0
    lora_dropout: float = 0.0
    penalty: float = 0.1
    penalty_batch: int = 16
    pooling: str | None = None
    augment: Augment = "none"
    precision: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    steps: int | None = None

    def __post_init__(self) -> None:
        at_least_one(
            batch=self.batch,
            max_length=self.max_length,
            rank=self.rank,
            penalty_batch=self.penalty_batch,
            steps=self.steps,
        )
        positive(epochs=self.epochs, alpha=self.alpha, lr=self.lr, head_lr=self.head_lr)
        not_negative(weight_decay=self.weight_decay, clip=self.clip, head_epochs=self.head_epochs, penalty=self.penalty)
        fraction(warmup=self.warmup, lora_dropout=self.lora_dropout, zero=True, one=False)
        if max(self.lr, self.head_lr) > _FASTEST:
            raise RecipeError(f"'lr' and 'head_lr' must be at most {_FASTEST:g}, got {self.lr:g} and {self.head_lr:g}")
