"""mergekit's YAML configs (0.1.5) as recipes of ours, for the methods that both have.

Read are `merge_method`, `models` with `weight` and `density`, `base_model`, `parameters` with `weight`, `density`,
`lambda`, `normalize`, `int8_mask` and `t`, `dtype`, and `tokenizer_source: base`. Every other key is refused by name,
and so is a parameter that the method does not have, which mergekit ignores.

*Differs from mergekit:* each task keeps its own head, where mergekit merges heads too and refuses heads of different
sizes. `dtype` says what is written; the arithmetic is in float32, where mergekit calculates in `dtype`. Without it, the
dtype is the base's; there, the widest among the models. Random draws are ours, so DARE gives another sample from the
same distribution.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from orthomerge.core.errors import RecipeError, nearest, some

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_KEYS = ("merge_method", "models", "base_model", "parameters", "dtype", "tokenizer_source")
_ALL = ("weight", "density", "lambda", "normalize")
# mergekit's name of a method, ours, and the parameters that it has there.
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
    "out_dtype": "give what is to be written as 'dtype'",
    "tokenizer": "embeddings are never rearranged: merge models with one vocabulary, and leave it out",
    "chat_template": "it means nothing to a classifier: leave it out",
    "random_seed": "leave it out, or write a recipe of ours, which has 'seed'",
    "gamma": "leave it out for mergekit's 0.01, or write a recipe of ours with 'breadcrumbs'",
    "rescale": "leave it out for mergekit's default, or write a recipe of ours",
    "filter_wise": "here each tensor has one angle: leave it out",
}
_NOTHING = 1e-8  # weights whose sum is under this are not divided by, as in mergekit


@dataclass(frozen=True)
class _Config:
    """What is merged: each model's own options, those for all, and the base."""

    method: str
    models: Mapping[str, Mapping[str, Any]]
    shared: Mapping[str, Any]
    base: str | None

    def number(self, name: str, default: float | None = None, *, model: str | None = None) -> float:
        """A number of one model, its own or that for all, or of the whole merge."""
        title = f"parameter {name!r}" + (f" of model {model!r}" if model is not None else "")
        value = {**self.shared, **self.models.get(model or "", {})}.get(name, default)
        if value is None:
            raise RecipeError(f"{title} is missing; {self.method} has no default for it")
        if isinstance(value, list | Mapping):
            raise RecipeError(f"{title} varies over layers or tensors, {value}; give one number for all")
        try:  # text too: YAML 1.1 reads 1e-3 as text, and mergekit takes it for the number
            return float("true" if isinstance(value, bool) else value)
        except (TypeError, ValueError, OverflowError):
            raise RecipeError(f"{title} must be a number, got {value!r}") from None

    def normalized(self, default: bool) -> bool:
        value = self.shared.get("normalize", default)
        if value not in (True, False):
            raise RecipeError(f"parameter 'normalize' must be true or false, got {value!r}")
        return bool(value)

    def weights(self, models: Sequence[str]) -> list[float]:
        return [self.number("weight", model=model) for model in models]


def translate(document: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """The mapping of a recipe from that of a mergekit config; `where` is the path of its file, for messages."""
    try:
        return _translated(document)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from error


def _translated(document: Mapping[str, Any]) -> dict[str, Any]:
    config = _config(document)
    source = document.get("tokenizer_source")
    if source is not None and (config.base is None or source != "base"):
        fix = "if all models share one tokenizer, leave it out, or use 'base' with a 'base_model'"
        raise RecipeError(f"tokenizer source {source!r} rearranges the embeddings, which is not done here; {fix}")
    dtype = str(document.get("dtype") or "keep").removeprefix("torch.")
    if dtype not in ("keep", *_DTYPES):
        raise RecipeError(f"cannot write weights as {dtype!r}; {nearest(dtype, _DTYPES)}")
    read = {"linear": _linear, "slerp": _slerp}.get(config.method, _task_vectors)
    models, parameters = read(config)
    experts = dict(zip(_names(models), models, strict=True))
    recipe = {"experts": experts, "method": _METHODS[config.method][0], "parameters": parameters, "dtype": dtype}
    # Slerp's base_model is one of the two that are merged, not what they were fine-tuned from.
    return recipe if config.base is None or config.method == "slerp" else {**recipe, "base": config.base}


def _config(document: Mapping[str, Any]) -> _Config:
    _check_keys(document, _KEYS, "the config")
    method, entries = document["merge_method"], document.get("models")
    if not isinstance(method, str) or method not in _METHODS:
        what = f"merge_method {method!r} is not among those that mergekit and orthomerge share"
        raise RecipeError(f"{what}; {nearest(str(method), _METHODS)}; `orthomerge list methods` lists ours")
    if not isinstance(entries, list) or not entries:
        raise RecipeError("'models' must be a list of the models to merge, each as '- model: PATH'")
    options = _METHODS[method][1]
    models: dict[str, Mapping[str, Any]] = {}
    for number, entry in enumerate(entries, 1):
        place = f"'models' item {number}"
        _check_keys(entry, ("model", "parameters"), place)
        model = _reference(entry.get("model"), f"{place}: 'model'")
        if model in models:
            raise RecipeError(f"the model {model!r} is listed twice; give it once, with both weights added")
        models[model] = entry.get("parameters") or {}
        own = tuple(name for name in options if name in ("weight", "density"))
        _check_keys(models[model], own, f"parameters of model {model!r}")
    shared, base = document.get("parameters") or {}, document.get("base_model")
    _check_keys(shared, (*options, "int8_mask"), "'parameters'")  # int8_mask: how mergekit stores a mask
    base = None if base is None else _reference(base, "'base_model'")
    return _Config(method, models, shared, base)


def _check_keys(options: object, known: tuple[str, ...], where: str) -> None:
    if not isinstance(options, Mapping):
        raise RecipeError(f"{where} must be a mapping of options, got {options!r}")
    for key in map(str, options):
        if key not in known:
            fix = _REFUSED.get(key) or nearest(key, known)
            raise RecipeError(f"{where}: {key!r} is not read from a config of mergekit's; {fix}")


def _reference(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise RecipeError(f"{what} must be text, a folder or org/name[@revision], got {value!r}")
    if "+" in value:
        fix = "in a recipe of ours, name the adapter's folder as the expert and its model as the 'base'"
        raise RecipeError(f"{what} {value!r} puts an adapter on a model; {fix}")
    return value


def _names(references: Sequence[str]) -> list[str]:
    """A task name for each model: the last part of its path, with the folder above where two would be the same."""
    paths = [PurePosixPath(reference.partition("@")[0].replace("\\", "/")) for reference in references]
    short = [_valid(path.name).casefold() for path in paths]
    names = dict[str, str]()  # by what they are on a disk that ignores case
    for place, path in enumerate(paths, 1):
        repeated = short.count(_valid(path.name).casefold()) > 1
        name = _valid(f"{path.parent.name}-{path.name}" if repeated else path.name)
        name = f"{name}-{place}" if name.casefold() in names else name
        names[name.casefold()] = name
    return list(names.values())


def _valid(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", name).lstrip("_.+-")[:90] or "expert"


def _linear(config: _Config) -> tuple[list[str], dict[str, Any]]:
    models = list(config.models)
    if config.base is not None and config.base not in models:
        if "weight" not in config.shared:
            what = f"mergekit counts 'base_model' among the models of a linear merge, and {config.base!r} has no weight"
            raise RecipeError(f"{what}; list it under 'models' with one, or leave 'base_model' out")
        models.append(config.base)
    weights = config.weights(models)
    total = math.fsum(weights)
    if not config.normalized(True) and abs(total - 1) > 1e-9:
        fix = "make them sum to 1, or use task_arithmetic with a 'base_model'"
        raise RecipeError(f"weights that sum to {total:g} scale the whole model when 'normalize' is false; {fix}")
    return models, {"weights": weights}


def _slerp(config: _Config) -> tuple[list[str], dict[str, Any]]:
    if config.base is None:
        raise RecipeError("slerp needs 'base_model', the one of the two models that t = 0 gives")
    models = [config.base, *(model for model in config.models if model != config.base)]
    if len(models) != 2:
        raise RecipeError(f"slerp merges exactly 2 models, 'base_model' and another, got {len(models)}")
    return models, {"t": config.number("t")}


def _task_vectors(config: _Config) -> tuple[list[str], dict[str, Any]]:
    """Methods that measure models from the base; the base itself, if it is listed, adds nothing."""
    method = config.method
    if config.base is None:
        raise RecipeError(f"{method} needs the model that the others were fine-tuned from as 'base_model'")
    models = [model for model in config.models if model != config.base]
    if not models:
        raise RecipeError("only the base is listed under 'models'; add the models to merge")
    if method == "model_stock":
        return models, {}
    weights, scale = config.weights(models), config.number("lambda", 1.0)
    density, *others = dict.fromkeys(config.number("density", 1.0, model=model) for model in models)
    if others:  # mergekit has one for each model
        raise RecipeError(f"'density' differs between the models ({some([density, *others])}); give them the same")
    normalized = config.normalized(method == "ties")
    if method in ("ties", "dare_linear", "dare_ties"):
        return models, {"density": density, "weights": weights, "scale": scale, "normalize": normalized}
    total = math.fsum(weights)
    scale /= total if normalized and abs(total) >= _NOTHING else 1.0
    scales = [weight * scale for weight in weights]
    if method == "breadcrumbs":
        return models, {"density": density, "gamma": 0.01, "scale": scales}
    if density != 1:
        raise RecipeError("'density' does nothing in task_arithmetic; leave it out, or use ties")
    return models, {"scale": scales}
