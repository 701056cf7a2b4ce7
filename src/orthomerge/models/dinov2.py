"""DINOv2: [CLS] and the mean of the patch tokens, side by side (2d features), go into one linear layer.

Oquab et al. 2023, arXiv 2304.07193.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orthomerge.models.family import Family, HeadLayout
from orthomerge.models.names import substitution
from orthomerge.models.pooling import cls, patches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

__all__ = ["FAMILY"]

# As in `vit`: module names of transformers 5 to those that it saves.
_disk_names = substitution(
    [
        (r"(?<=\.)attention\.q_proj\.", "attention.attention.query."),
        (r"(?<=\.)attention\.k_proj\.", "attention.attention.key."),
        (r"(?<=\.)attention\.v_proj\.", "attention.attention.value."),
        (r"(?<=\.)attention\.o_proj\.", "attention.output.dense."),
    ]
)


def _cls_mean(encoder: Callable[..., Any], batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    import torch

    hidden: torch.Tensor = encoder(**batch).last_hidden_state
    return torch.cat([hidden[:, 0], hidden[:, 1:].mean(1)], dim=1)


FAMILY = Family(
    name="dinov2",
    title="DINOv2",
    model_types=("dinov2",),
    modality="image",
    encoder_class="Dinov2Model",
    prefix="dinov2.",
    head=HeadLayout(("classifier",)),
    poolings={"cls_mean": _cls_mean, "cls": cls, "mean": patches(1)},
    architecture="Dinov2ForImageClassification",
    optional=("embeddings.mask_token",),
    adapt=_disk_names,
)
