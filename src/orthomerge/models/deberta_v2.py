"""DeBERTa-v2 and v3: the first token goes through `pooler.dense`, which belongs to the head here.

He et al. 2021, arXiv 2006.03654 and 2111.09543.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orthomerge.errors import IncompatibleError
from orthomerge.models.family import Family, HeadLayout
from orthomerge.models.names import modern_layer_norm
from orthomerge.models.pooling import cls, mean

if TYPE_CHECKING:
    from orthomerge.checkpoints.checkpoint import Checkpoint

__all__ = ["FAMILY"]


def _adapt(checkpoint: Checkpoint) -> Checkpoint:
    # The one family whose config chooses the head's activation; all published models have GELU.
    activation = (checkpoint.config or {}).get("pooler_hidden_act", "gelu")
    if activation != "gelu":
        raise IncompatibleError(
            f"{checkpoint.path}: 'pooler_hidden_act' in a DeBERTa-v2 config must be 'gelu', got "
            f"{activation!r}; "
            "name the head's layers and activation in the recipe"
        )
    return modern_layer_norm(checkpoint)


FAMILY = Family(
    name="deberta_v2",
    title="DeBERTa-v2 / v3",
    model_types=("deberta-v2",),
    modality="text",
    encoder_class="DebertaV2Model",
    prefix="deberta.",
    head=HeadLayout(("pooler.dense", "classifier"), "gelu"),
    poolings={"cls": cls, "mean": mean},
    architecture="DebertaV2ForSequenceClassification",
    # Old files keep absolute positions even where the model (position_biased_input: false) does not use them.
    optional=("embeddings.position_embeddings.*", "embeddings.position_ids"),
    foreign=("cls.*", "lm_predictions.*", "mask_predictions.*"),
    adapt=_adapt,
)
