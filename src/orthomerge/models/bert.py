"""BERT: the pooled [CLS] token (dense, tanh: part of the encoder) goes into one linear layer.

Devlin et al. 2019, arXiv 1810.04805.
"""

from orthomerge.models.family import Family, HeadLayout
from orthomerge.models.names import modern_layer_norm
from orthomerge.models.pooling import cls, mean, pooler

__all__ = ["FAMILY"]

FAMILY = Family(
    name="bert",
    title="BERT",
    model_types=("bert",),
    modality="text",
    encoder_class="BertModel",
    prefix="bert.",
    head=HeadLayout(("classifier",)),
    poolings={"pooler": pooler, "cls": cls, "mean": mean},
    architecture="BertForSequenceClassification",
    optional=("pooler.*", "embeddings.position_ids"),
    foreign=("cls.*",),
    adapt=modern_layer_norm,
)
