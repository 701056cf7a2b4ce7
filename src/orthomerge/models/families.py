"""Table of model families: where each keeps its encoder and head, and how features are pooled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import RecipeError, nearest
from orthomerge.core.schema import find_row
from orthomerge.models.family import (
    Batch,
    Family,
    HeadLayout,
    cls,
    cls_mean,
    eos,
    mean,
    patches,
    pooler,
    projection,
    shifted_decoder,
)
from orthomerge.models.names import deberta_names, dinov2_names, modern_layer_norm, vision_names, vit_names

if TYPE_CHECKING:
    import torch


_ONE_LAYER = HeadLayout(("classifier",))
_DENSE_AND_OUT = ("classifier.dense", "classifier.out_proj")
_TEXT_SIDE = ("text_model.*", "text_projection.*", "logit_scale")


_Names = tuple[str, str, str]  # name, title, and prefix of its class names in transformers


def _stock(task: str, names: _Names, **fields: Any) -> Family:
    name, title, stem = names
    usual = {"model_types": (name,), "prefix": f"{name}.", "encoder_class": f"{stem}Model"}
    return Family(name=name, title=title, architecture=f"{stem}For{task}Classification", **{**usual, **fields})


_text = partial(_stock, "Sequence", modality="text", adapt=modern_layer_norm)
_image = partial(_stock, "Image", modality="image", head=_ONE_LAYER)
# RoBERTa and its like: the first token goes into a head of two layers, and the pooler is unused.
_roberta = partial(
    _text,
    prefix="roberta.",
    head=HeadLayout(_DENSE_AND_OUT, "tanh"),
    poolings={"cls": cls, "mean": mean},
    optional=("pooler.*", "embeddings.position_ids"),
    foreign=("lm_head.*",),
)

_ROWS = (
    # Devlin et al. 2019, arXiv 1810.04805. The pooled [CLS] token (dense, tanh: in the encoder) goes into one layer.
    _text(
        ("bert", "BERT", "Bert"),
        head=_ONE_LAYER,
        poolings={"pooler": pooler, "cls": cls, "mean": mean},
        optional=("pooler.*", "embeddings.position_ids"),
        foreign=("cls.*",),
    ),
    _roberta(("roberta", "RoBERTa", "Roberta")),  # Liu et al. 2019, arXiv 1907.11692
    # Conneau et al. 2020, arXiv 1911.02116, and Martin et al. 2020, arXiv 1911.03894: RoBERTa's layout and prefix.
    _roberta(("xlm_roberta", "XLM-RoBERTa", "XLMRoberta"), model_types=("xlm-roberta",)),
    _roberta(("camembert", "CamemBERT", "Camembert")),
    # Sanh et al. 2019, arXiv 1910.01108. The first token goes into a head of two layers with ReLU between.
    _text(
        ("distilbert", "DistilBERT", "DistilBert"),
        head=HeadLayout(("pre_classifier", "classifier"), "relu"),
        poolings={"cls": cls, "mean": mean},
        optional=("embeddings.position_ids",),
        foreign=("vocab_transform.*", "vocab_layer_norm.*", "vocab_projector.*"),
    ),
    # Clark et al. 2020, arXiv 2003.10555. The first token goes into a head of two layers with GELU between; no pooler.
    _text(
        ("electra", "ELECTRA", "Electra"),
        head=HeadLayout(_DENSE_AND_OUT, "gelu"),
        poolings={"cls": cls, "mean": mean},
        optional=("embeddings.position_ids",),
        foreign=("discriminator_predictions.*", "generator_predictions.*", "generator_lm_head.*"),
    ),
    # He et al. 2021, arXiv 2006.03654 and 2111.09543. The first token goes through `pooler.dense`, part of the head
    # here. Old files keep absolute positions even where the model (position_biased_input: false) does not use them.
    _text(
        ("deberta_v2", "DeBERTa-v2 / v3", "DebertaV2"),
        model_types=("deberta-v2",),
        prefix="deberta.",
        head=HeadLayout(("pooler.dense", "classifier"), "gelu"),
        poolings={"cls": cls, "mean": mean},
        optional=("embeddings.position_embeddings.*", "embeddings.position_ids"),
        foreign=("cls.*", "lm_predictions.*", "mask_predictions.*"),
        adapt=deberta_names,
    ),
    # Raffel et al. 2020, arXiv 1910.10683. The decoder reads the input itself, shifted by one, as in BART (Lewis et al.
    # 2020); its state at the last end-of-sequence token goes into a head of two layers.
    # `lm_head` is tied to `shared` in T5 1.0 but not in 1.1 and Flan: it is left out, not treated as tied. The bias is
    # in the files of the first T5 models, and no later code reads it.
    _text(
        ("t5", "T5, encoder and decoder", "T5"),
        prefix="transformer.",
        head=HeadLayout(("classification_head.dense", "classification_head.out_proj"), "tanh"),
        poolings={"eos": eos},
        forward=shifted_decoder,
        foreign=("lm_head.*", "*decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"),
        tied={"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"},
        adapt=None,
    ),
    # The mean of the encoder's states goes into a linear layer (Sentence-T5, Ni et al. 2022, arXiv 2108.08877).
    Family(
        name="t5_encoder",
        title="T5, encoder only",
        model_types=("t5",),
        modality="text",
        encoder_class="T5EncoderModel",
        prefix="transformer.",
        head=_ONE_LAYER,
        poolings={"mean": mean, "cls": cls},
        foreign=("decoder.*", "transformer.decoder.*", "lm_head.*"),
        tied={"encoder.embed_tokens.weight": "shared.weight"},
    ),
    # Dosovitskiy et al. 2021, arXiv 2010.11929. The [CLS] token after the last norm goes into one linear layer.
    _image(
        ("vit", "ViT", "ViT"),
        poolings={"cls": cls, "mean": patches(1)},
        optional=("pooler.*", "embeddings.mask_token"),
        foreign=("decoder.*",),
        adapt=vit_names,
    ),
    # Touvron et al. 2021, arXiv 2012.12877. ViT with a distillation token, which its plain classifier does not read.
    # The distilled models have two heads, averaged by a class of its own: not a head that experts can have.
    _image(
        ("deit", "DeiT", "DeiT"),
        poolings={"cls": cls, "mean": patches(2)},
        optional=("pooler.*", "embeddings.mask_token"),
        foreign=("decoder.*", "cls_classifier.*", "distillation_classifier.*"),
        adapt=vit_names,
    ),
    # Oquab et al. 2023, arXiv 2304.07193. [CLS] and the mean of the patches, side by side (2d), go into one layer.
    _image(
        ("dinov2", "DINOv2", "Dinov2"),
        poolings={"cls_mean": cls_mean, "cls": cls, "mean": patches(1)},
        optional=("embeddings.mask_token",),
        adapt=dinov2_names,
    ),
    # Radford et al. 2021, arXiv 2103.00020. The vision tower with its projection; the text tower makes the head from
    # class names (`zero_shot`). Experts come as `CLIPVisionModel` (they take the base's projection), as
    # `CLIPVisionModelWithProjection`, as whole `CLIPModel`s, or in open_clip's format; all become the second.
    Family(
        name="clip",
        title="CLIP, zero-shot head",
        model_types=("clip", "clip_vision_model"),
        modality="image",
        encoder_class="CLIPVisionModelWithProjection",
        prefix="",
        head=None,
        poolings={"projection": projection},
        optional=("visual_projection.weight", "vision_model.embeddings.position_ids"),
        foreign=_TEXT_SIDE,
        adapt=vision_names,
    ),
    # The mean of the patch tokens goes into one linear layer; the classifier of transformers reads neither [CLS] nor
    # the projection. Names keep their `vision_model.`: `CLIPVisionModel` loads them so under transformers 4 and 5.
    _image(
        ("clip_classifier", "CLIP, linear head", "CLIP"),
        model_types=("clip", "clip_vision_model"),
        encoder_class="CLIPVisionModel",
        prefix="",
        poolings={"mean": patches(1), "cls": cls},
        optional=("vision_model.embeddings.position_ids",),
        foreign=(*_TEXT_SIDE, "visual_projection.*"),
        adapt=vision_names,
    ),
)
FAMILIES: Mapping[str, Family] = {row.name: row for row in _ROWS}


def family(name: str) -> Family:
    if name == "generic":
        raise RecipeError("family 'generic' must be described; give `encoder_prefix` and the `head` of each expert")
    return find_row(FAMILIES, name, what="model family")


def family_for(model_type: str, keys: Iterable[str]) -> Family:
    """Find a family by the `model_type` of a config and, where two share it, by an expert's tensor names (`keys`)."""
    fitting = {row.name: row for row in FAMILIES.values() if model_type in row.model_types}
    if not fitting:
        model_types = sorted({kind for row in FAMILIES.values() for kind in row.model_types})
        raise RecipeError(
            f"unknown model type {model_type!r} ({nearest(model_type, model_types)}); for any other model write "
            "`family: generic` in the recipe, with its `encoder_prefix` and the `head` of each expert"
        )
    if len(fitting) == 1:
        return next(iter(fitting.values()))
    names = list(keys)
    linear = any(name == "classifier.weight" or name.endswith(".classifier.weight") for name in names)
    if "clip" in fitting:
        return fitting["clip_classifier" if linear else "clip"]
    decoder = any("decoder." in name for name in names)
    return fitting["t5" if decoder and not linear else "t5_encoder"]


def generic(prefix: str) -> Family:
    """Describe any module that keeps its encoder under `prefix`; each expert names its head."""
    return Family(
        name="generic",
        title="any module",
        model_types=(),
        modality="other",
        encoder_class="",
        prefix=prefix if not prefix or prefix.endswith(".") else f"{prefix}.",
        head=None,
        poolings={"output": _output},
    )


def _output(output: Any, batch: Batch, config: Any) -> torch.Tensor:
    import torch

    if not isinstance(output, torch.Tensor):
        raise RecipeError(
            f"a generic encoder must return one tensor, got {type(output).__name__}; wrap it in a module that does"
        )
    return output
