"""Build a recipe from a command line and perhaps a file, whose keys it overrides."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orthomerge.api.merge import AUTO
from orthomerge.core.errors import RecipeError
from orthomerge.core.schema import build, schema
from orthomerge.data.reading import sources_of
from orthomerge.models.opening import experts_by_name
from orthomerge.runs.recipe import Recipe, load_recipe_mapping, parse_value

_FILES = (".yaml", ".yml")
_NOTHING = (
    "nothing to merge: give a recipe, or experts and their base, for example: "
    "orthomerge merge topic tone --base base --out merged"
)


def read_request(
    words: Sequence[str],
    *,
    settings: Mapping[str, str] | None = None,
    data: Mapping[str, str] | str | None = None,
    split: str | None = None,
    limit: int | None = None,
    device: str | None = None,
    edit: bool = False,
    **options: Any,
) -> Recipe:
    """Return the recipe of a command line.

    `words`: experts, or a recipe file and perhaps the output. `settings`: options of the method or keys of the recipe,
    as texts. `data`, `split`, `limit`, `device`: of a fit. `options`: other keys, None if not given. `edit`: the
    command merges nothing, so the recipe may neither fit nor align.
    """
    where, document, rest = _document(words)
    if options.get("base") is None:
        _check_base(words)
    if rest and options.get("out") is not None:
        raise RecipeError(f"there are two outputs, {rest[0]!r} and --out; leave out one")
    document |= {"out": rest[0]} if rest else {}
    if options.get("method", document.get("method")) != document.get("method") and options["method"] is not None:
        document["parameters"] = {}  # they belong to another method
    document |= {key: value for key, value in options.items() if value is not None}
    _set(document, read_options(settings), where)
    for section in ("align", "fit") if edit else ():
        if section in document:
            raise RecipeError(f"{where}: this command does not use the section {section!r}; leave it out")
    if "experts" not in document:
        raise RecipeError(f"{where}: {_NOTHING}")
    sources = sources_of(data, document["experts"]) if data else {}
    fit = {"data": sources or None, "split": split, "limit": limit, "device": device}
    document |= _fit(document, {key: value for key, value in fit.items() if value is not None})
    return build(Recipe, document, where=where)


def read_options(settings: Mapping[str, str] | None) -> dict[str, Any]:
    """Parse the values of `--set KEY=VALUE` as in a recipe."""
    return {key: parse_value(value) for key, value in (settings or {}).items()}


def _document(words: Sequence[str]) -> tuple[str, dict[str, Any], Sequence[str]]:
    """Return the name of the source for messages, its keys, and the words after a recipe file."""
    if not words:
        raise RecipeError(_NOTHING)
    path, *rest = words
    if not path.lower().endswith(_FILES):
        return "the command line", {"experts": experts_by_name(words)}, []
    if len(rest) > 1:
        raise RecipeError(f"a recipe is followed by at most one output folder, got {', '.join(rest)}")
    return path, dict(load_recipe_mapping(Path(path))), rest


def _check_base(words: Sequence[str]) -> None:
    """Refuse a base among the experts, a common first mistake."""
    base = next((word for word in words if "=" not in word and Path(word).name.lower() in ("base", "base_model")), None)
    if base is not None and len(words) > 1:
        others = " ".join(word for word in words if word != base)
        raise RecipeError(
            f"is {base!r} the model that the experts were fine-tuned from? Then type: orthomerge merge {others} "
            f"--base {base} --out OUT; if it is an expert, name its task: NAME={base}"
        )


def _set(document: dict[str, Any], options: Mapping[str, Any], where: str) -> None:
    """Set keys of a recipe, or else options of its method."""
    keys = set(schema(Recipe)) - {"parameters", "experts"}
    document |= {key: value for key, value in options.items() if key in keys}
    parameters = {key: value for key, value in options.items() if key not in keys}
    if parameters:
        before = document.get("parameters") or {}
        if not isinstance(before, dict):
            raise RecipeError(f"{where}: 'parameters' must be a mapping of options")
        document["parameters"] = {**before, **parameters}


def _fit(document: Mapping[str, Any], fit: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that flags of a fit set: the section `fit`, or only `device` if the method uses no inputs."""
    from orthomerge.merging.methods import find_method

    parameters, method = document.get("parameters"), str(document.get("method", AUTO))
    searched = isinstance(parameters, dict) and parameters.get("scale") == AUTO
    if fit and not searched and (method == AUTO or find_method(method).fitted):
        section = document.get("fit") or {}
        return {"fit": {**section, **fit} if isinstance(section, dict) else section}
    unused = sorted(set(fit) - ({"data", "device"} if searched else {"device"}))
    if unused == ["data"]:
        raise RecipeError(f"{method!r} uses no inputs: --data is for fitted methods and --set scale=auto; leave it out")
    if unused:
        raise RecipeError(f"--{unused[-1]} is for a method that is fitted to inputs (--data); leave it out")
    return {"device": fit["device"]} if "device" in fit else {}
