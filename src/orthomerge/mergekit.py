"""mergekit's YAML configs (0.1.5) as recipes of ours, for the methods that both have.

What would change the result and cannot be said in a recipe is refused by name: numbers that vary over layers or
tensors, several slices, sub-modules, tokenizer surgery, `model+lora`. An unknown key is an error; mergekit ignores it.

*Differs from mergekit:* each task keeps its own head, where mergekit merges heads too and refuses heads of different
sizes. `dtype` and `out_dtype` say what is written; the arithmetic is in float32, where mergekit calculates in `dtype`.
With neither, the dtype is the base's; there, the widest among the models. Random draws are ours, so DARE gives
another sample from the same distribution. `random_seed`, an argument of mergekit's command, may stand in the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from orthomerge.errors import RecipeError, nearest, some
from orthomerge.strict import build

__all__ = ["translate"]

Options = Mapping[str, Any]

# What mergekit has and we have not, so that a name which is merely unknown here is told from a typing error.
_THEIRS = (
    "arcee_fusion", "breadcrumbs_ties", "della", "della_linear", "karcher", "multislerp", "nearswap", "nuslerp",
    "passthrough", "ram", "ramplus_tl", "sce",
)  # fmt: skip
_DTYPES = ("bfloat16", "float16", "float32", "float64")
_LAYER_COUNTS = ("num_hidden_layers", "n_layers", "num_layers")  # in config.json; families differ
_NOTHING = 1e-8  # weights whose sum is under this are not divided by, as in mergekit


@dataclass(frozen=True)
class _Model:
    model: Any
    parameters: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Source:
    model: Any
    layer_range: tuple[int, ...]
    parameters: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Slice:
    sources: tuple[_Source, ...]
    base_model: Any = None
    residual_weight: float | None = None  # mergekit reads it and does nothing with it
    parameters: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Config:
    """The keys of a merge config; an option that mergekit does not know is unknown here too."""

    merge_method: str
    base_model: Any = None
    models: tuple[_Model, ...] = ()
    slices: tuple[_Slice, ...] = ()
    modules: Any = None
    parameters: dict[str, Any] | None = None
    dtype: str | None = None
    out_dtype: str | None = None
    tokenizer_source: Any = None
    tokenizer: Any = None
    chat_template: Any = None
    random_seed: int = 0


@dataclass(frozen=True)
class _Inputs:
    """What is merged: each model's own options, those for all (the nearest first), and the base."""

    where: str
    method: str
    models: Mapping[str, Options]
    shared: tuple[Options, ...]
    base: str | None
    base_joins: bool  # mergekit adds a base that is not listed to the models, but not to a slice

    def number(self, name: str, default: float | None = None) -> float:
        """An option of the whole merge."""
        return _number(*self._find(name, self.shared, default), self.where)

    def flag(self, name: str, default: bool) -> bool:
        """A yes-or-no option of the whole merge."""
        value, place = self._find(name, self.shared, default)
        value = _constant(value, f"{self.where}: {place}")
        if value not in (True, False):
            raise RecipeError(f"{self.where}: {place} must be true or false, got {value!r}")
        return bool(value)

    def each(self, name: str, models: tuple[str, ...], default: float | None = None) -> list[float]:
        """An option of each model, its own or the one for all."""
        return [
            _number(*self._find(name, (self.models.get(model, {}), *self.shared), default, model=model), self.where)
            for model in models
        ]

    def same(self, name: str, models: tuple[str, ...], default: float) -> float:
        """An option that mergekit has for each model and we have for all."""
        numbers = self.each(name, models, default)
        if len(set(numbers)) > 1:
            raise RecipeError(
                f"{self.where}: {name!r} differs between the models ({some(numbers)}), and here one holds for all; "
                "give them the same"
            )
        return numbers[0]

    def _find(
        self, name: str, places: tuple[Options, ...], default: float | None, *, model: str = ""
    ) -> tuple[Any, str]:
        of = f" of model {model!r}" if model else ""
        for options in places:
            if name in options:
                return options[name], f"parameter {name!r}{of}"
        if default is None:
            raise RecipeError(f"{self.where}: parameter {name!r}{of} is missing; {self.method} has no default for it")
        return default, ""


# The experts in order, and the options of our method.
_Translated = tuple[tuple[str, ...], dict[str, Any]]


@dataclass(frozen=True)
class _Rule:
    """How one of mergekit's methods is said here: our name for it, and the options of the merge and of each model."""

    ours: str
    translate: Callable[[_Inputs], _Translated]
    shared: frozenset[str]
    own: frozenset[str] = frozenset()


def translate(document: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """The mapping of a recipe from that of a mergekit config; `where` is the path of its file, for messages."""
    config = build(_Config, document, where=where)
    rule = _rule(config.merge_method, where)
    inputs = _inputs(config, where)
    _refuse_surgery(config, inputs.base, where)
    for model, options in inputs.models.items():
        _check_names(options, rule, f"{where}: model {model!r}", config.merge_method, of_model=True)
    for options in inputs.shared:
        _check_names(options, rule, where, config.merge_method)
    experts, parameters = rule.translate(inputs)
    recipe = {
        "experts": dict(zip(_names(experts), experts, strict=True)),
        "method": rule.ours,
        "parameters": parameters,
        "dtype": _dtype(config.out_dtype or config.dtype, where),
        "seed": config.random_seed,
    }
    # Slerp's base_model is one of the two that are merged, not what they were fine-tuned from.
    return recipe if inputs.base is None or rule.ours == "slerp" else {**recipe, "base": inputs.base}


def _rule(method: str, where: str) -> _Rule:
    if method in _RULES:
        return _RULES[method]
    if method in _THEIRS:
        raise RecipeError(
            f"{where}: merge_method {method!r} is not among those that mergekit and orthomerge share; "
            f"use one of {', '.join(sorted(_RULES))}, or see `orthomerge methods` for ours"
        )
    raise RecipeError(f"{where}: unknown merge_method {method!r}; {nearest(method, (*_RULES, *_THEIRS))}")


def _inputs(config: _Config, where: str) -> _Inputs:
    if config.modules:
        raise RecipeError(f"{where}: 'modules' merges parts of a model apart; only whole models can be merged here")
    if bool(config.models) == bool(config.slices):
        raise RecipeError(f"{where}: give the models to merge under 'models' (or as one slice under 'slices')")
    base, shared, listed = config.base_model, [config.parameters or {}], config.models
    if config.slices:
        if len(config.slices) > 1:
            raise RecipeError(
                f"{where}: {len(config.slices)} slices stack layers of different merges; only one slice of all layers "
                "can be merged here: write it as 'models'"
            )
        cut = config.slices[0]
        base = base if cut.base_model is None else cut.base_model
        shared.insert(0, cut.parameters or {})
        listed = tuple(_Model(source.model, source.parameters) for source in cut.sources)
        for source in cut.sources:
            _check_whole(_reference(source.model, f"{where}: 'model'"), source.layer_range, where)
    models: dict[str, Options] = {}
    for entry in listed:
        reference = _reference(entry.model, f"{where}: 'model'")
        if reference in models:
            raise RecipeError(
                f"{where}: the model {reference!r} is listed twice; give it once, with both weights added"
            )
        models[reference] = entry.parameters or {}
    base = None if base is None else _reference(base, f"{where}: 'base_model'")
    return _Inputs(where, config.merge_method, models, tuple(shared), base, base_joins=not config.slices)


def _reference(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise RecipeError(f"{what} must be text, a folder or org/name[@revision], got {value!r}")
    if "+" in value:
        raise RecipeError(
            f"{what} {value!r} puts an adapter on a model; in a recipe of ours, name the adapter's folder as "
            "the expert and its model as the 'base'"
        )
    return value


def _check_whole(model: str, layers: tuple[int, ...], where: str) -> None:
    """A slice is a merge of whole models only if it has all their layers, which is for their configs to say."""
    for folder in (Path(where).parent / model, Path(model)):
        if (folder / "config.json").is_file():
            from orthomerge.checkpoints.documents import read_json

            config = read_json(folder / "config.json")
            count = next((config[key] for key in _LAYER_COUNTS if key in config), None)
            break
    else:
        count = None
    if count is None:
        raise RecipeError(
            f"{where}: whether layer_range {list(layers)} is all of {model!r} cannot be seen here; "
            "if it is, list the model under 'models' instead of 'slices'"
        )
    if list(layers) != [0, count]:
        raise RecipeError(
            f"{where}: layer_range {list(layers)} is not all of {model!r}, which has {count} layers; "
            "only whole models can be merged here"
        )


def _refuse_surgery(config: _Config, base: str | None, where: str) -> None:
    """Tokenizers are taken from the base as they are; embeddings are never rearranged."""
    tokenizer = config.tokenizer
    source = config.tokenizer_source
    if tokenizer is not None:
        if not isinstance(tokenizer, Mapping) or set(tokenizer) - {"source"}:
            raise RecipeError(
                f"{where}: 'tokenizer' rearranges the embeddings, which is not done here; merge models with one "
                "vocabulary, and leave it out"
            )
        source = tokenizer.get("source", "union")
    if source is not None and (base is None or source not in ("base", base)):
        raise RecipeError(
            f"{where}: tokenizer source {source!r} rearranges the embeddings, which is not done here; "
            "if all models share one tokenizer it changes nothing: leave it out, or use 'base' with a 'base_model'"
        )
    if config.chat_template is not None:
        raise RecipeError(f"{where}: 'chat_template' means nothing to a classifier; leave it out")


def _check_names(options: Options, rule: _Rule, where: str, method: str, *, of_model: bool = False) -> None:
    shared = rule.shared | {"int8_mask"}  # how mergekit stores a mask; changes nothing
    for name in options:
        if name in rule.own or (name in shared and not of_model):
            continue
        if name in shared:
            raise RecipeError(
                f"{where}: parameter {name!r} holds for the whole merge, and mergekit ignores it here; "
                "move it to the 'parameters' of the file"
            )
        known = rule.own | (frozenset() if of_model else shared)
        raise RecipeError(f"{where}: unknown parameter {name!r} of {method}; {nearest(name, known)}")


def _constant(value: Any, what: str) -> Any:
    """One value for all layers and tensors."""
    if isinstance(value, Mapping) and set(value) <= {"value", "filter"} and value.get("filter") in (None, "*"):
        return _constant(value.get("value"), what)
    if isinstance(value, list) and len(value) == 1:
        return _constant(value[0], what)
    if isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(item, Mapping) for item in value)):
        raise RecipeError(
            f"{what} depends on a filter over the names of tensors; here one number holds for all: give one"
        )
    if isinstance(value, list):
        raise RecipeError(f"{what} is a gradient over the layers, {value}; here one number holds for all: give one")
    return value


def _number(value: Any, place: str, where: str) -> float:
    value = _constant(value, f"{where}: {place}")
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError):
            return float(value)  # text too: YAML 1.1 reads 1e-3 as text, and mergekit takes it for the number
    raise RecipeError(f"{where}: {place} must be a number, got {value!r}")


def _dtype(name: str | None, where: str) -> str:
    if name is None:
        return "keep"
    name = name.removeprefix("torch.")
    if name not in _DTYPES:
        raise RecipeError(f"{where}: cannot write weights as {name!r}; {nearest(name, _DTYPES)}")
    return name


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


def _linear(inputs: _Inputs) -> _Translated:
    models = tuple(inputs.models)
    if inputs.base_joins and inputs.base is not None and inputs.base not in models:
        if not any("weight" in options for options in inputs.shared):
            raise RecipeError(
                f"{inputs.where}: mergekit counts 'base_model' among the models of a linear merge, and "
                f"{inputs.base!r} has no weight; list it under 'models' with one, or leave 'base_model' out"
            )
        models = (*models, inputs.base)
    weights = inputs.each("weight", models)
    total = math.fsum(weights)
    if not inputs.flag("normalize", True) and abs(total - 1) > 1e-9:
        raise RecipeError(
            f"{inputs.where}: weights that sum to {total:g} scale the whole model when 'normalize' is false; "
            "make them sum to 1, or use task_arithmetic with a 'base_model'"
        )
    return models, {"weights": weights}


def _vectors(inputs: _Inputs) -> tuple[str, ...]:
    """The models that are measured from the base; the base itself, if it is listed, adds nothing."""
    if inputs.base is None:
        raise RecipeError(
            f"{inputs.where}: {inputs.method} needs the model that the others were fine-tuned from as 'base_model'"
        )
    models = tuple(model for model in inputs.models if model != inputs.base)
    if not models:
        raise RecipeError(f"{inputs.where}: only the base is listed under 'models'; add the models to merge")
    return models


def _scales(inputs: _Inputs, models: tuple[str, ...]) -> list[float]:
    """Each weight times lambda, divided by the sum of the weights when normalised."""
    weights, factor = inputs.each("weight", models), inputs.number("lambda", 1.0)
    total = math.fsum(weights)
    if inputs.flag("normalize", False) and abs(total) >= _NOTHING:
        factor /= total
    return weights if factor == 1 else [weight * factor for weight in weights]


def _task_arithmetic(inputs: _Inputs) -> _Translated:
    models = _vectors(inputs)
    if set(inputs.each("density", models, 1.0)) != {1.0}:
        raise RecipeError(
            f"{inputs.where}: 'density' does nothing in task_arithmetic, in mergekit neither; leave it out, or use ties"
        )
    return models, {"scale": _scales(inputs, models)}


def _breadcrumbs(inputs: _Inputs) -> _Translated:
    models = _vectors(inputs)
    _refuse_rescale(inputs)
    density, gamma = inputs.same("density", models, 1.0), inputs.same("gamma", models, 0.01)
    return models, {"density": density, "gamma": gamma, "scale": _scales(inputs, models)}


def _ties(inputs: _Inputs) -> _Translated:
    models = _vectors(inputs)
    _refuse_rescale(inputs)
    return models, {**_weighted(inputs, models), "normalize": inputs.flag("normalize", True)}


def _dare(inputs: _Inputs) -> _Translated:
    models = _vectors(inputs)
    flags = {"normalize": inputs.flag("normalize", False), "rescale": inputs.flag("rescale", True)}
    return models, {**_weighted(inputs, models), **flags}


def _weighted(inputs: _Inputs, models: tuple[str, ...]) -> dict[str, Any]:
    return {
        "density": inputs.same("density", models, 1.0),
        "weights": inputs.each("weight", models),
        "scale": inputs.number("lambda", 1.0),
    }


def _refuse_rescale(inputs: _Inputs) -> None:
    if inputs.flag("rescale", False):
        raise RecipeError(
            f"{inputs.where}: 'rescale' restores the norm of what {inputs.method} trims, which is not done here; "
            "leave it out, or use a larger 'lambda'"
        )


def _slerp(inputs: _Inputs) -> _Translated:
    if inputs.base is None:
        raise RecipeError(f"{inputs.where}: slerp needs 'base_model', the one of the two models that t = 0 gives")
    others = tuple(model for model in inputs.models if model != inputs.base)
    if len(others) != 1:
        raise RecipeError(
            f"{inputs.where}: slerp merges exactly 2 models, 'base_model' and another, got {1 + len(others)}"
        )
    return (inputs.base, *others), {"t": inputs.number("t")}


def _model_stock(inputs: _Inputs) -> _Translated:
    if inputs.flag("filter_wise", False):
        raise RecipeError(
            f"{inputs.where}: 'filter_wise' takes an angle for each row, here each tensor has one; leave it out"
        )
    return _vectors(inputs), {}


_SHARED = frozenset({"normalize", "rescale", "lambda"})
_OWN = frozenset({"weight", "density"})
_RULES: Mapping[str, _Rule] = {
    "linear": _Rule("average", _linear, frozenset({"normalize"}), frozenset({"weight"})),
    "task_arithmetic": _Rule("task_arithmetic", _task_arithmetic, _SHARED, _OWN),
    "ties": _Rule("ties@mergekit", _ties, _SHARED, _OWN),
    "dare_linear": _Rule("dare@mergekit", _dare, _SHARED, _OWN),
    "dare_ties": _Rule("dare_ties@mergekit", _dare, _SHARED, _OWN),
    "breadcrumbs": _Rule("breadcrumbs", _breadcrumbs, _SHARED, _OWN | {"gamma"}),
    "slerp": _Rule("slerp", _slerp, frozenset({"t"})),
    "model_stock": _Rule("model_stock", _model_stock, frozenset({"filter_wise"})),
}
