"""Translate YAML configs of mergekit 0.1.5 into recipes, for the methods that both have; other keys are refused.

*Differs from mergekit:* each task keeps its own head; mergekit merges heads too. A parameter that the method does not
have is refused; mergekit ignores it. `dtype` is the type of the output, by default the base's, and arithmetic is in
float32; mergekit computes in `dtype`, by default the widest among the models. DARE draws another random sample.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from orthomerge.core.errors import RecipeError, nearest, some
from orthomerge.core.schema import build

_ALL = ("weight", "density", "lambda", "normalize")
# Methods by their name in mergekit: our name, and mergekit's parameters.
_METHODS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "linear": ("average", ("weight", "normalize")),
    "task_arithmetic": ("task_arithmetic", _ALL),
    "ties": ("ties@mergekit", _ALL),
    "dare_linear": ("dare@mergekit", _ALL),
    "dare_ties": ("dare_ties@mergekit", _ALL),
    "breadcrumbs": ("breadcrumbs", _ALL),
    "slerp": ("slerp", ("t",)),
    "model_stock": ("model_stock", ()),
}
# Keys that are refused, with what to do instead.
_REFUSED = {
    "slices": "only whole models can be merged here: list them under 'models'",
    "modules": "only whole models can be merged here: list them under 'models'",
    "tokenizer": "embeddings are never rearranged: merge models with one vocabulary, and leave it out",
    "random_seed": "leave it out, or write a recipe of ours, which has 'seed'",
}
_SMALLEST_SUM = 1e-8  # of weights that are divided by their sum, as in mergekit


@dataclass(frozen=True)
class _Model:
    model: str
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Config:
    merge_method: str
    models: tuple[_Model, ...]
    base_model: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    dtype: str = "keep"
    tokenizer_source: str | None = None

    def number(self, name: str, default: float | None = None, *, model: str | None = None) -> float:
        """Return a parameter of a model, or of the merge; a model's own value overrides that for all."""
        parameters = next((entry.parameters for entry in self.models if entry.model == model), {})
        value = {**self.parameters, **parameters}.get(name, default)
        title = f"parameter {name!r}" + (f" of model {model!r}" if model is not None else "")
        if value is None:
            raise RecipeError(f"{title} is missing; {self.merge_method} has no default for it")
        try:  # also text: YAML 1.1 parses 1e-3 as text, which mergekit accepts as a number
            return float("true" if isinstance(value, bool) else value)
        except (TypeError, ValueError, OverflowError):
            raise RecipeError(f"{title} must be one number, for all layers and tensors, got {value!r}") from None


def translate(document: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Translate a config of mergekit into the mapping of a recipe. `where`: the path of its file, for messages."""
    _refuse(document, where)
    config = build(_Config, {name: value for name, value in document.items() if value is not None}, where=where)
    try:
        return _translated(config)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from error


def _translated(config: _Config) -> dict[str, Any]:
    method, base, source = config.merge_method, config.base_model, config.tokenizer_source
    _check(config)
    if source is not None and (base is None or source != "base"):
        raise RecipeError(
            f"tokenizer source {source!r} rearranges the embeddings, which is not done here; if all models share one "
            "tokenizer, leave it out, or use 'base' with a 'base_model'"
        )
    dtype = config.dtype.removeprefix("torch.")
    read = {"linear": _linear, "slerp": _slerp}.get(method, _task_vectors)
    models, parameters = read(config)
    experts = dict(zip(_names(models), models, strict=True))
    recipe = {"experts": experts, "method": _METHODS[method][0], "parameters": parameters, "dtype": dtype}
    # Slerp's base_model is one of the two that are merged, not what they were fine-tuned from.
    return recipe if base is None or method == "slerp" else {**recipe, "base": base}


def _check(config: _Config) -> None:
    """Refuse methods that only mergekit has, adapters, repeated models, and parameters that the method ignores."""
    method, references = config.merge_method, [entry.model for entry in config.models]
    if method not in _METHODS:
        raise RecipeError(
            f"merge_method {method!r} is not among those that mergekit and orthomerge share; "
            f"{nearest(method, _METHODS)}; `orthomerge list methods` lists ours"
        )
    for reference in (*references, config.base_model or ""):
        if "+" in reference:
            fix = "in a recipe of ours, name the adapter's folder as the expert and its model as the 'base'"
            raise RecipeError(f"{reference!r} puts an adapter on a model; {fix}")
        if references.count(reference) > 1:
            raise RecipeError(f"the model {reference!r} is listed twice; give it once, with both weights added")
    shared = _METHODS[method][1]
    per_model = tuple(name for name in shared if name in ("weight", "density"))
    _refuse(config.parameters, "'parameters'", (*shared, "int8_mask"))  # int8_mask: how mergekit stores a mask
    if config.parameters.get("normalize") not in (None, True, False):
        raise RecipeError(f"parameter 'normalize' must be true or false, got {config.parameters['normalize']!r}")
    for entry in config.models:
        _refuse(entry.parameters, f"parameters of model {entry.model!r}", per_model)


def _refuse(options: Mapping[str, Any], where: str, known: Sequence[str] | None = None) -> None:
    """Refuse unsupported keys of mergekit and, if `known` is given, every key that is not in it."""
    for key in map(str, options):
        if key in _REFUSED or (known is not None and key not in known):
            fix = _REFUSED.get(key) or nearest(key, known or ())
            raise RecipeError(f"{where}: {key!r} is not supported in a config of mergekit; {fix}")


def _names(references: Sequence[str]) -> list[str]:
    """Return a task name per model: the last part of its path, with the parent folder if two would be equal."""
    paths = [PurePosixPath(reference.partition("@")[0].replace("\\", "/")) for reference in references]
    short = [_valid(path.name).casefold() for path in paths]
    names = dict[str, str]()  # keys: names on a file system that ignores case
    for place, path in enumerate(paths, 1):
        repeated = short.count(_valid(path.name).casefold()) > 1
        name = _valid(f"{path.parent.name}-{path.name}" if repeated else path.name)
        name = f"{name}-{place}" if name.casefold() in names else name
        names[name.casefold()] = name
    return list(names.values())


def _valid(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", name).lstrip("_.+-")[:90] or "expert"


def _linear(config: _Config) -> tuple[list[str], dict[str, Any]]:
    models, base = [entry.model for entry in config.models], config.base_model
    if base is not None and base not in models:
        if "weight" not in config.parameters:
            problem = f"mergekit counts 'base_model' among the models of a linear merge, and {base!r} has no weight"
            raise RecipeError(f"{problem}; list it under 'models' with one, or leave 'base_model' out")
        models.append(base)
    weights = [config.number("weight", model=model) for model in models]
    total = math.fsum(weights)
    if not config.parameters.get("normalize", True) and abs(total - 1) > 1e-9:
        raise RecipeError(
            f"weights that sum to {total:g} scale the whole model when 'normalize' is false; "
            "make them sum to 1, or use task_arithmetic with a 'base_model'"
        )
    return models, {"weights": weights}


def _slerp(config: _Config) -> tuple[list[str], dict[str, Any]]:
    if config.base_model is None:
        raise RecipeError("slerp needs 'base_model', the one of the two models that t = 0 gives")
    models = [config.base_model, *(entry.model for entry in config.models if entry.model != config.base_model)]
    if len(models) != 2:
        raise RecipeError(f"slerp merges exactly 2 models, 'base_model' and another, got {len(models)}")
    return models, {"t": config.number("t")}


def _task_vectors(config: _Config) -> tuple[list[str], dict[str, Any]]:
    """Translate a method on task vectors; the base's own is zero, so a listed base is left out."""
    method = config.merge_method
    if config.base_model is None:
        raise RecipeError(f"{method} needs the model that the others were fine-tuned from as 'base_model'")
    models = [entry.model for entry in config.models if entry.model != config.base_model]
    if not models:
        raise RecipeError("only the base is listed under 'models'; add the models to merge")
    if method == "model_stock":
        return models, {}
    weights, scale = [config.number("weight", model=model) for model in models], config.number("lambda", 1.0)
    density, *others = dict.fromkeys(config.number("density", 1.0, model=model) for model in models)
    if others:  # mergekit allows one per model
        raise RecipeError(f"'density' differs between the models ({some([density, *others])}); give them the same")
    normalized = config.parameters.get("normalize", method == "ties")
    if method in ("ties", "dare_linear", "dare_ties"):
        return models, {"density": density, "weights": weights, "scale": scale, "normalize": normalized}
    total = math.fsum(weights)
    scale /= total if normalized and abs(total) >= _SMALLEST_SUM else 1.0
    scales = [weight * scale for weight in weights]
    if method == "breadcrumbs":
        return models, {"density": density, "gamma": 0.01, "scale": scales}
    if density != 1:
        raise RecipeError("'density' does nothing in task_arithmetic; leave it out, or use ties")
    return models, {"scale": scales}
