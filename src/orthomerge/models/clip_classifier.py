"""CLIP's vision tower as a plain image classifier: the mean of the patch tokens goes into one linear layer.

Radford et al. 2021, arXiv 2103.00020; the classifier is that of transformers and reads neither [CLS] nor the
projection. Names keep their `vision_model.`: `CLIPVisionModel` loads them so under transformers 4 and 5.
"""

from orthomerge.models.clip import TEXT_SIDE, vision_names
from orthomerge.models.family import Family, HeadLayout
from orthomerge.models.pooling import cls, patches

__all__ = ["FAMILY"]

FAMILY = Family(
    name="clip_classifier",
    title="CLIP, linear head",
    model_types=("clip", "clip_vision_model"),
    modality="image",
    encoder_class="CLIPVisionModel",
    prefix="",
    head=HeadLayout(("classifier",)),
    poolings={"mean": patches(1), "cls": cls},
    architecture="CLIPForImageClassification",
    optional=("vision_model.embeddings.position_ids",),
    foreign=(*TEXT_SIDE, "visual_projection.*"),
    adapt=vision_names,
)
