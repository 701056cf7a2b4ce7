"""DeiT: ViT with a distillation token, which its plain classifier carries along but does not read.

Touvron et al. 2021, arXiv 2012.12877.
"""

from orthomerge.models.family import Family, HeadLayout
from orthomerge.models.pooling import cls, patches
from orthomerge.models.vit import disk_names

__all__ = ["FAMILY"]

FAMILY = Family(
    name="deit",
    title="DeiT",
    model_types=("deit",),
    modality="image",
    encoder_class="DeiTModel",
    prefix="deit.",
    head=HeadLayout(("classifier",)),
    poolings={"cls": cls, "mean": patches(2)},
    architecture="DeiTForImageClassification",
    encoder_options={"add_pooling_layer": False},
    optional=("pooler.*", "embeddings.mask_token"),
    # The distilled models have two heads, averaged by a class of its own: no head that an expert could have.
    foreign=("decoder.*", "cls_classifier.*", "distillation_classifier.*"),
    adapt=disk_names,
)
