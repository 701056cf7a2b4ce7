"""RoBERTa: the bare first token goes into a head of two layers; the pooler, where there is one, is unused.

Liu et al. 2019, arXiv 1907.11692.
"""

from orthomerge.models.family import Family, HeadLayout
from orthomerge.models.names import modern_layer_norm
from orthomerge.models.pooling import cls, mean

__all__ = ["FAMILY"]

FAMILY = Family(
    name="roberta",
    title="RoBERTa",
    model_types=("roberta",),
    modality="text",
    encoder_class="RobertaModel",
    prefix="roberta.",
    head=HeadLayout(("classifier.dense", "classifier.out_proj"), "tanh"),
    poolings={"cls": cls, "mean": mean},
    architecture="RobertaForSequenceClassification",
    encoder_options={"add_pooling_layer": False},
    optional=("pooler.*", "embeddings.position_ids"),
    foreign=("lm_head.*",),
    adapt=modern_layer_norm,
)
