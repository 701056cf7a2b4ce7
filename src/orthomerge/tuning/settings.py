"""Settings of fine-tuning, the schema of a recipe's `tuning`; they are recorded in the expert's config.

The defaults suit small encoders. The published CLIP experts were made with AdamW, lr 1e-5, weight decay 0.1, batch 128,
warm-up then cosine, gradients clipped at 1, head frozen (Ilharco et al. 2023, arXiv 2212.04089).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

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
        limits: dict[str, tuple[float, float]] = {
            **dict.fromkeys(("epochs", "alpha"), (math.ulp(0.0), math.inf)),
            **dict.fromkeys(("lr", "head_lr"), (math.ulp(0.0), _FASTEST)),
            **dict.fromkeys(("batch", "max_length", "rank", "penalty_batch"), (1, math.inf)),
            **dict.fromkeys(("weight_decay", "clip", "head_epochs", "penalty"), (0, math.inf)),
            **dict.fromkeys(("warmup", "lora_dropout"), (0, math.nextafter(1.0, 0.0))),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not (low <= value <= high and math.isfinite(value)):
                least = "at least 1" if low == 1 else "0 or more" if low == 0 else "above 0"
                most = " and below 1" if high < 1 else f" and at most {high:g}" if high < math.inf else ""
                raise RecipeError(f"{name!r} must be {least}{most}, got {value!r}")
        if self.steps is not None and self.steps < 1:
            raise RecipeError(f"'steps' must be at least 1, or nothing for no cap, got {self.steps!r}")
