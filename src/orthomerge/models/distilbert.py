"""DistilBERT: the first token goes into a head of two layers with ReLU between.

Sanh et al. 2019, arXiv 1910.01108.
"""

from orthomerge.models.family import Family, HeadLayout
from orthomerge.models.names import modern_layer_norm
from orthomerge.models.pooling import cls, mean

__all__ = ["FAMILY"]

FAMILY = Family(
    name="distilbert",
    title="DistilBERT",
    model_types=("distilbert",),
    modality="text",
    encoder_class="DistilBertModel",
    prefix="distilbert.",
    head=HeadLayout(("pre_classifier", "classifier"), "relu"),
    poolings={"cls": cls, "mean": mean},
    architecture="DistilBertForSequenceClassification",
    optional=("embeddings.position_ids",),
    foreign=("vocab_transform.*", "vocab_layer_norm.*", "vocab_projector.*"),
    adapt=modern_layer_norm,
)
