"""ViT: the [CLS] token after the last norm goes into one linear layer.

Dosovitskiy et al. 2021, arXiv 2010.11929.
"""

from orthomerge.models.family import Family, HeadLayout
from orthomerge.models.names import substitution
from orthomerge.models.pooling import cls, patches

__all__ = ["FAMILY", "disk_names"]

# transformers 5 renamed the modules but still saves the old names; a bare `state_dict()` has the new ones.
disk_names = substitution(
    [
        (r"^((?:.*\.)?)layers\.(\d+)\.", r"\1encoder.layer.\2."),
        (r"(?<=\.)attention\.q_proj\.", "attention.attention.query."),
        (r"(?<=\.)attention\.k_proj\.", "attention.attention.key."),
        (r"(?<=\.)attention\.v_proj\.", "attention.attention.value."),
        (r"(?<=\.)attention\.o_proj\.", "attention.output.dense."),
        (r"(?<=\.)mlp\.fc1\.", "intermediate.dense."),
        (r"(?<=\.)mlp\.fc2\.", "output.dense."),
    ]
)

FAMILY = Family(
    name="vit",
    title="ViT",
    model_types=("vit",),
    modality="image",
    encoder_class="ViTModel",
    prefix="vit.",
    head=HeadLayout(("classifier",)),
    poolings={"cls": cls, "mean": patches(1)},
    architecture="ViTForImageClassification",
    encoder_options={"add_pooling_layer": False},
    optional=("pooler.*", "embeddings.mask_token"),
    foreign=("decoder.*",),
    adapt=disk_names,
)
