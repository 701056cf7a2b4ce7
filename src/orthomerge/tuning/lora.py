"""LoRA through peft: low-rank changes of the attention's projections, and the head trained whole.

Hu et al. 2022, arXiv 2106.09685; on the layers of KnOTS (Stoica et al. 2025, arXiv 2410.19735): query, key, value and
output. The adapter's names are those of the stock classifier, so that peft can put it on one.
"""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

from torch import nn

from orthomerge.core.errors import RecipeError
from orthomerge.models.skeleton import quiet

if TYPE_CHECKING:
    from pathlib import Path

    from orthomerge.models.family import Family
    from orthomerge.tuning.model import Model
    from orthomerge.tuning.settings import Tuning


_ATTENTION = re.compile(r"(^|[._])(self_?)?att(entio)?n([._]|$)", re.IGNORECASE)


def add_adapter(model: Model, family: Family, *, base: Path, settings: Tuning) -> Any:
    """Put an adapter into the model's encoder; the peft model around it knows how to save it."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise RecipeError("mode 'lora' needs peft: pip install peft") from error
    stock = _stock_layout(model, family)
    targets = sorted(name for name, module in stock.named_modules() if _is_projection(name, module))
    if not targets:
        raise RecipeError(
            f"no attention projections were found in {family.encoder_class}; use another mode than 'lora'"
        )
    layers = list(family.head.layers) if family.head else []
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=targets,
        modules_to_save=layers or None,
        base_model_name_or_path=str(base),
    )
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.name_or_path = str(base)  # type: ignore[assignment]
        adapted = get_peft_model(stock, config)
    if layers:
        model.head(0).layers = nn.ModuleList(stock.get_submodule(layer) for layer in layers)
    return adapted


def _is_projection(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and _ATTENTION.search(name) is not None


def _stock_layout(model: Model, family: Family) -> nn.Module:
    """The model's own modules under the names that the stock class gives them."""
    encoder = model.encoding.tuned()
    if family.head is None:  # CLIP without a head: the encoder is the stock class
        return encoder
    stock = nn.Module()
    # CLIP's classifier keeps the vision tower without a prefix of its own.
    place, inner = family.prefix.removesuffix("."), encoder
    if not place:
        place, inner = "vision_model", getattr(encoder, "vision_model", encoder)
    stock.add_module(place, inner)
    for name, layer in zip(family.head.layers, model.head(0).layers, strict=True):
        parent, _, last = name.rpartition(".")
        if parent and parent not in dict(stock.named_children()):
            stock.add_module(parent, nn.Module())
        stock.get_submodule(parent).add_module(last, layer)
    return stock
