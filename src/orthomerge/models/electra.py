"""ELECTRA: the first token goes into a head of two layers with GELU between; there is no pooler.

Clark et al. 2020, arXiv 2003.10555.
"""

from orthomerge.models.family import Family, HeadLayout
from orthomerge.models.names import modern_layer_norm
from orthomerge.models.pooling import cls, mean

__all__ = ["FAMILY"]

FAMILY = Family(
    name="electra",
    title="ELECTRA",
    model_types=("electra",),
    modality="text",
    encoder_class="ElectraModel",
    prefix="electra.",
    head=HeadLayout(("classifier.dense", "classifier.out_proj"), "gelu"),
    poolings={"cls": cls, "mean": mean},
    architecture="ElectraForSequenceClassification",
    optional=("embeddings.position_ids",),
    foreign=("discriminator_predictions.*", "generator_predictions.*", "generator_lm_head.*"),
    adapt=modern_layer_norm,
)
