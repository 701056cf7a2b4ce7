"""The table of model families, written by hand; a family's file is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from orthomerge.errors import RecipeError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from orthomerge.models.family import Family

__all__ = ["FAMILIES", "family", "family_for"]

FAMILIES: Mapping[str, str] = {
    "bert": "orthomerge.models.bert",
    "roberta": "orthomerge.models.roberta",
    "xlm_roberta": "orthomerge.models.xlm_roberta",
    "camembert": "orthomerge.models.camembert",
    "distilbert": "orthomerge.models.distilbert",
    "electra": "orthomerge.models.electra",
    "deberta_v2": "orthomerge.models.deberta_v2",
    "t5": "orthomerge.models.t5",
    "t5_encoder": "orthomerge.models.t5_encoder",
    "vit": "orthomerge.models.vit",
    "deit": "orthomerge.models.deit",
    "dinov2": "orthomerge.models.dinov2",
    "clip": "orthomerge.models.clip",
    "clip_classifier": "orthomerge.models.clip_classifier",
}


def family(name: str) -> Family:
    """A family by its name in the table."""
    if name == "generic":
        raise RecipeError("family 'generic' must be described: give `encoder_prefix` and the `head` of each expert")
    if name not in FAMILIES:
        raise RecipeError(f"unknown model family {name!r}; {nearest(name, [*FAMILIES, 'generic'])}")
    found: Family = import_module(FAMILIES[name]).FAMILY
    return found


def family_for(model_type: str, keys: Iterable[str]) -> Family:
    """The family of a checkpoint, by the `model_type` of its config and, where two share it, by its tensors.

    Ask with the names of an expert: a bare base does not say what kind of classifier was made of it.
    """
    families = [family(name) for name in FAMILIES]
    fitting = {found.name: found for found in families if model_type in found.model_types}
    if not fitting:
        known = sorted({known for found in families for known in found.model_types})
        raise RecipeError(
            f"unknown model type {model_type!r} ({nearest(model_type, known)}); for any other model write "
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
