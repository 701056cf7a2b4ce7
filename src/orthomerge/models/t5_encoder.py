"""T5's encoder alone with a linear layer over the mean of its states; transformers has no class for it.

Raffel et al. 2020, arXiv 1910.10683; mean pooling as in Sentence-T5 (Ni et al. 2022, arXiv 2108.08877).
"""

from orthomerge.models.family import Family, HeadLayout
from orthomerge.models.pooling import cls, mean

__all__ = ["FAMILY"]

FAMILY = Family(
    name="t5_encoder",
    title="T5, encoder only",
    model_types=("t5",),
    modality="text",
    encoder_class="T5EncoderModel",
    prefix="transformer.",
    head=HeadLayout(("classifier",)),
    poolings={"mean": mean, "cls": cls},
    foreign=("decoder.*", "transformer.decoder.*", "lm_head.*"),
    tied={"encoder.embed_tokens.weight": "shared.weight"},
)
