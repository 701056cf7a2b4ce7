"""CLIP's vision tower with its projection; the text tower makes the head from class names (see `zero_shot`).

Radford et al. 2021, arXiv 2103.00020. Experts come as `CLIPVisionModel` (no projection: it is the base's),
`CLIPVisionModelWithProjection`, whole `CLIPModel`s, and in open_clip's format; all are brought to the second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orthomerge.models.family import Family
from orthomerge.models.names import rename
from orthomerge.models.open_clip import is_open_clip, to_transformers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from orthomerge.checkpoints.checkpoint import Checkpoint

__all__ = ["FAMILY", "TEXT_SIDE", "vision_names"]

TEXT_SIDE = ("text_model.*", "text_projection.*", "logit_scale")
# What `CLIPVisionModel` of transformers 5 saves bare; all others put `vision_model.` before it.
_BARE = ("embeddings.", "encoder.", "pre_layrnorm.", "post_layernorm.")


def vision_names(checkpoint: Checkpoint) -> Checkpoint:
    """Every writer's names to those of `CLIPVisionModelWithProjection`."""
    if is_open_clip(checkpoint):
        return to_transformers(checkpoint)
    return rename(checkpoint, lambda name: f"vision_model.{name}" if name.startswith(_BARE) else name)


def _projection(encoder: Callable[..., Any], batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    features: torch.Tensor = encoder(**batch).image_embeds
    return features


FAMILY = Family(
    name="clip",
    title="CLIP, zero-shot head",
    model_types=("clip", "clip_vision_model"),
    modality="image",
    encoder_class="CLIPVisionModelWithProjection",
    prefix="",
    head=None,
    poolings={"projection": _projection},
    optional=("visual_projection.weight", "vision_model.embeddings.position_ids"),
    foreign=TEXT_SIDE,
    adapt=vision_names,
)
