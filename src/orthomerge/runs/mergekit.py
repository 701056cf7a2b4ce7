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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from orthomerge.core.errors import RecipeError, nearest, some

Options = Mapping[str, Any]

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_KEYS = ("merge_method", "models", "base_model", "parameters", "dtype", "tokenizer_source")
_WAYS = {
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
class _Inputs:
    """What is merged: each model's own options, those for all, and the base."""

    where: str
    method: str
    models: Mapping[str, Options]
    shared: Options
    base: str | None

    def refusal(self, message: str) -> RecipeError:
        return RecipeError(f"{self.where}: {message}")

    def number(self, name: str, default: float | None = None, *, model: str | None = None) -> float:
        """A number of one model, its own or that for all, or of the whole merge."""
        title = f"parameter {name!r}" + (f" of model {model!r}" if model is not None else "")
        options = {**self.shared, **(self.models.get(model, {}) if model is not None else {})}
        value = options.get(name, default)
        if value is None:
            raise self.refusal(f"{title} is missing; {self.method} has no default for it")
        if isinstance(value, list | Mapping):
            raise self.refusal(
                f"{title} varies over layers or tensors, {value}; here one number holds for all: give one"
            )
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            with suppress(ValueError, OverflowError):
                return float(value)  # text too: YAML 1.1 reads 1e-3 as text, and mergekit takes it for the number
        raise self.refusal(f"{title} must be a number, got {value!r}")

    def normalized(self, default: bool) -> bool:
        value = self.shared.get("normalize", default)
        if value not in (True, False):
            raise self.refusal(f"parameter 'normalize' must be true or false, got {value!r}")
        return bool(value)

    def weights(self, models: tuple[str, ...]) -> list[float]:
        return [self.number("weight", model=model) for model in models]

    def density(self, models: tuple[str, ...]) -> float:
        """One for all models, where mergekit has one for each."""
        numbers = [self.number("density", 1.0, model=model) for model in models]
        if len(set(numbers)) > 1:
            raise self.refusal(
                f"'density' differs between the models ({some(numbers)}); here one holds for all: give them the same"
            )
        return numbers[0]


def translate(document: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """The mapping of a recipe from that of a mergekit config; `where` is the path of its file, for messages."""
    _check_keys(document, _KEYS, where)
    inputs = _inputs(document, where)
    source = document.get("tokenizer_source")
    if source is not None and (inputs.base is None or source != "base"):
        raise inputs.refusal(
            f"tokenizer source {source!r} rearranges the embeddings, which is not done here; if all models share one "
            "tokenizer it changes nothing: leave it out, or use 'base' with a 'base_model'"
        )
    rule = _RULES[inputs.method]
    experts, parameters = rule.translate(inputs)
    recipe = {
        "experts": dict(zip(_names(experts), experts, strict=True)),
        "method": rule.ours,
        "parameters": parameters,
        "dtype": _dtype(document.get("dtype"), where),
    }
    # Slerp's base_model is one of the two that are merged, not what they were fine-tuned from.
    return recipe if inputs.base is None or inputs.method == "slerp" else {**recipe, "base": inputs.base}


def _check_keys(options: object, known: tuple[str, ...], where: str) -> None:
    if not isinstance(options, Mapping):
        raise RecipeError(f"{where} must be a mapping of options, got {options!r}")
    for key in options:
        if key not in known:
            way = _WAYS.get(str(key)) or nearest(str(key), known)
            raise RecipeError(f"{where}: {str(key)!r} is not read from a config of mergekit's; {way}")


def _inputs(document: Mapping[str, Any], where: str) -> _Inputs:
    method, listed = document["merge_method"], document.get("models")
    if not isinstance(method, str) or method not in _RULES:
        raise RecipeError(
            f"{where}: merge_method {method!r} is not among those that mergekit and orthomerge share; "
            f"{nearest(str(method), _RULES)}; `orthomerge list methods` lists ours"
        )
    if not isinstance(listed, list) or not listed:
        raise RecipeError(f"{where}: 'models' must be a list of the models to merge, each as '- model: PATH'")
    models: dict[str, Options] = {}
    for number, entry in enumerate(listed, 1):
        place = f"{where}: 'models' item {number}"
        _check_keys(entry, ("model", "parameters"), place)
        model = _reference(entry.get("model"), f"{place}: 'model'")
        if model in models:
            raise RecipeError(f"{where}: the model {model!r} is listed twice; give it once, with both weights added")
        models[model] = entry.get("parameters") or {}
        own = tuple(name for name in ("weight", "density") if name in _RULES[method].parameters)
        _check_keys(models[model], own, f"{where}: parameters of model {model!r}")
    shared, base = document.get("parameters") or {}, document.get("base_model")
    _check_keys(shared, (*_RULES[method].parameters, "int8_mask"), f"{where}: 'parameters'")  # a mask's storage
    return _Inputs(where, method, models, shared, None if base is None else _reference(base, f"{where}: 'base_model'"))


def _reference(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise RecipeError(f"{what} must be text, a folder or org/name[@revision], got {value!r}")
    if "+" in value:
        raise RecipeError(
            f"{what} {value!r} puts an adapter on a model; in a recipe of ours, name the adapter's folder as "
            "the expert and its model as the 'base'"
        )
    return value


def _dtype(name: Any, where: str) -> str:
    if name is None:
        return "keep"
    short = str(name).removeprefix("torch.")
    if short not in _DTYPES:
        raise RecipeError(f"{where}: cannot write weights as {short!r}; {nearest(short, _DTYPES)}")
    return short


def _names(references: tuple[str, ...]) -> list[str]:
    """A task name for each model: the last part of its path, with the folder above where two would be the same."""
    paths = [PurePosixPath(reference.partition("@")[0].replace("\\", "/")) for reference in references]
    short = [_valid(path.name) for path in paths]
    again = {name.casefold() for name in short if [other.casefold() for other in short].count(name.casefold()) > 1}
    names: list[str] = []
    for path, name in zip(paths, short, strict=True):
        wanted = _valid(f"{path.parent.name}-{name}") if name.casefold() in again else name
        taken = {other.casefold() for other in names}
        tries = (wanted, *(f"{wanted}-{number}" for number in range(2, len(paths) + 2)))
        names.append(next(name for name in tries if name.casefold() not in taken))
    return names


def _valid(name: str) -> str:
    kept = re.sub(r"[^A-Za-z0-9_.+-]+", "-", name).lstrip("_.+-")
    return kept[:90] or "expert"


# The experts in order, and the options of our method.
_Translated = tuple[tuple[str, ...], dict[str, Any]]


def _linear(inputs: _Inputs) -> _Translated:
    models = tuple(inputs.models)
    if inputs.base is not None and inputs.base not in models:
        if "weight" not in inputs.shared:
            raise inputs.refusal(
                f"mergekit counts 'base_model' among the models of a linear merge, and {inputs.base!r} has no weight; "
                "list it under 'models' with one, or leave 'base_model' out"
            )
        models = (*models, inputs.base)
    weights = inputs.weights(models)
    total = math.fsum(weights)
    if not inputs.normalized(True) and abs(total - 1) > 1e-9:
        raise inputs.refusal(
            f"weights that sum to {total:g} scale the whole model when 'normalize' is false; make them sum to 1, or "
            "use task_arithmetic with a 'base_model'"
        )
    return models, {"weights": weights}


def _vectors(inputs: _Inputs) -> tuple[str, ...]:
    """The models that are measured from the base; the base itself, if it is listed, adds nothing."""
    if inputs.base is None:
        raise inputs.refusal(f"{inputs.method} needs the model that the others were fine-tuned from as 'base_model'")
    models = tuple(model for model in inputs.models if model != inputs.base)
    if not models:
        raise inputs.refusal("only the base is listed under 'models'; add the models to merge")
    return models


def _scales(inputs: _Inputs, models: tuple[str, ...]) -> list[float]:
    """Each weight times lambda, divided by the sum of the weights when normalised."""
    weights, factor = inputs.weights(models), inputs.number("lambda", 1.0)
    total = math.fsum(weights)
    if inputs.normalized(False) and abs(total) >= _NOTHING:
        factor /= total
    return weights if factor == 1 else [weight * factor for weight in weights]


def _task_arithmetic(inputs: _Inputs) -> _Translated:
    models = _vectors(inputs)
    if inputs.density(models) != 1:
        raise inputs.refusal(
            "'density' does nothing in task_arithmetic, in mergekit neither; leave it out, or use ties"
        )
    return models, {"scale": _scales(inputs, models)}


def _breadcrumbs(inputs: _Inputs) -> _Translated:
    models = _vectors(inputs)
    return models, {"density": inputs.density(models), "gamma": 0.01, "scale": _scales(inputs, models)}


def _ties(inputs: _Inputs) -> _Translated:
    models = _vectors(inputs)
    return models, {
        "density": inputs.density(models),
        "weights": inputs.weights(models),
        "scale": inputs.number("lambda", 1.0),
        "normalize": inputs.normalized(inputs.method == "ties"),
    }


def _slerp(inputs: _Inputs) -> _Translated:
    if inputs.base is None:
        raise inputs.refusal("slerp needs 'base_model', the one of the two models that t = 0 gives")
    others = tuple(model for model in inputs.models if model != inputs.base)
    if len(others) != 1:
        raise inputs.refusal(f"slerp merges exactly 2 models, 'base_model' and another, got {1 + len(others)}")
    return (inputs.base, *others), {"t": inputs.number("t")}


def _model_stock(inputs: _Inputs) -> _Translated:
    return _vectors(inputs), {}


@dataclass(frozen=True)
class _Rule:
    """How one of mergekit's methods is said here: our name for it, and the parameters that it has there."""

    ours: str
    translate: Callable[[_Inputs], _Translated]
    parameters: tuple[str, ...] = ()


_ALL = ("weight", "density", "lambda", "normalize")
_RULES: Mapping[str, _Rule] = {
    "linear": _Rule("average", _linear, ("weight", "normalize")),
    "task_arithmetic": _Rule("task_arithmetic", _task_arithmetic, _ALL),
    "ties": _Rule("ties@mergekit", _ties, _ALL),
    "dare_linear": _Rule("dare@mergekit", _ties, _ALL),
    "dare_ties": _Rule("dare_ties@mergekit", _ties, _ALL),
    "breadcrumbs": _Rule("breadcrumbs", _breadcrumbs, _ALL),
    "slerp": _Rule("slerp", _slerp, ("t",)),
    "model_stock": _Rule("model_stock", _model_stock),
}
