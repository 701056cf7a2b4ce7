"""Recipes: what to merge, how, where to, and what to do with the result; typed, strict, and read from YAML."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from orthomerge.core.checks import parse_size
from orthomerge.core.errors import RecipeError
from orthomerge.core.schema import build
from orthomerge.models.opening import Expert, Opening, OpeningOptions, check_task_names
from orthomerge.runs.sections import Align, Diagnose, Evaluate, Fit, Report, Sweep

_MOST_BYTES = 1 << 20
_MOST_DEPTH = 50  # of nested lists and mappings
# PyYAML also raises errors of Python: `!!bool x` is a KeyError.
_NOT_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError)

Dtype = Literal["keep", "float32", "float16", "bfloat16", "float64"]


@dataclass(frozen=True)
class Recipe(OpeningOptions):
    """A recipe. Relative paths in a file are relative to its folder.

    `method`: auto is `realign` if there is a section `fit`, else `task_arithmetic`. `device`: for methods that
    decompose matrices; `fit` has its own. `evaluate`, `diagnose`, `report` and `sweep` are for `orthomerge.run`: with
    `evaluate`, diagnosis and report are made unless they are false; with `sweep`, many merges are scored.
    """

    experts: Mapping[str, Expert | str]
    method: str = "auto"
    parameters: dict[str, Any] = field(default_factory=dict)
    vector: str | None = None
    out: str | None = None
    dtype: Dtype = "keep"
    max_shard_size: str | int = "5GB"
    seed: int = 0
    device: str = "cpu"
    align: Align | None = None
    fit: Fit | None = None
    evaluate: Evaluate | None = None
    diagnose: bool | Diagnose | None = None
    report: bool | Report | None = None
    sweep: Sweep | None = None

    def __post_init__(self) -> None:
        if self.method == "auto":
            object.__setattr__(self, "method", "task_arithmetic" if self.fit is None else "realign")
        check_task_names(self.experts)
        if not -(2**63) <= self.seed < 2**63:
            raise RecipeError("'seed' must be a whole number of at most 63 bits")
        parse_size(self.max_shard_size)
        for name in ("align", "fit", "evaluate"):
            if getattr(self, name) is not None and not getattr(self, name).data:
                raise RecipeError(f"{name!r} has no data: give that of at least one task as 'data', or leave it out")
        for name in ("diagnose", "report", "sweep"):
            if getattr(self, name) and self.evaluate is None:
                raise RecipeError(f"{name!r} needs data: give a section 'evaluate' too, or leave {name!r} out")
        if self.diagnosis.scales and self.base is None:
            raise RecipeError("'scales' merges again, which needs a base; give 'base', or leave 'scales' out")

    @property
    def tasks(self) -> dict[str, Expert]:
        """Experts by task name, with short forms written out."""
        return {task: Expert(item) if isinstance(item, str) else item for task, item in self.experts.items()}

    @property
    def opening(self) -> Opening:
        options = {option.name: getattr(self, option.name) for option in fields(Opening)}
        return Opening(**{**options, "experts": self.tasks})

    @property
    def diagnosis(self) -> Diagnose:
        """Section `diagnose` with its defaults."""
        section = self.diagnose if isinstance(self.diagnose, Diagnose) else Diagnose()
        return replace(section, aligner=section.aligner or ("auto" if self.align is None else self.align.aligner))

    @property
    def data(self) -> list[Any]:
        sections = [section for section in (self.fit, self.align, self.evaluate) if section is not None]
        return [source for section in sections for source in section.data.values()]

    @property
    def searches_scale(self) -> bool:
        """Whether the scale is chosen on validation data."""
        return bool(self.parameters.get("scale") == "auto")

    def with_scale(self, scale: float) -> Recipe:
        return replace(self, parameters={**self.parameters, "scale": scale})

    def with_merge(self, method: str, parameters: Mapping[str, Any], *, seed: int, fitted: bool) -> Recipe:
        """Return the recipe with another merge; `fitted`: whether that is fitted to the inputs of `fit`."""
        fit = self.fit if fitted else None
        return replace(self, method=method, parameters=dict(parameters), seed=seed, fit=fit)

    def absolute(self) -> Recipe:
        """Return the recipe with absolute paths, for processes with other working directories."""
        if not all(type(source) is str for source in self.data):  # a source with named columns is a subclass
            raise RecipeError("data in memory cannot be given to other processes; name files, or leave out 'on'")
        return build(Recipe, _anchored(asdict(self), Path.cwd()), where="the recipe")

    def text(self) -> str:
        """Format as JSON, which is YAML, without options at their defaults and without data in memory."""
        defaults = Recipe(experts={"task": "path"})
        options = {name: value for name, value in vars(self).items() if value != getattr(defaults, name)}
        return json.dumps(options, default=_plain, indent=2, ensure_ascii=False)


def read_recipe(path: Path) -> Recipe:
    """Read a YAML recipe of orthomerge or mergekit."""
    return build(Recipe, load_recipe_mapping(path), where=str(path))


def load_recipe_mapping(path: Path) -> Mapping[str, Any]:
    """Read a recipe file, ours or mergekit's, as plain data; relative paths are joined to its folder.

    Of YAML only safe tags are allowed, no duplicate keys, no aliases, and a bounded size and depth.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise RecipeError(f"{path} is larger than {_MOST_BYTES} bytes; that is not a recipe")
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not a text file") from error
    except OSError as error:
        raise RecipeError(f"cannot read the recipe {path}: {error.strerror}") from error
    try:
        document = yaml.load(text, _Loader)  # noqa: S506 - _Loader is a SafeLoader that allows less
    except _NOT_YAML as error:
        raise RecipeError(
            f"{path} is not valid YAML: {error}\n"
            "a recipe contains text, numbers, lists and mappings; see docs/recipes.md"
        ) from error
    if not isinstance(document, dict):
        raise RecipeError(f"{path} must be a mapping of options, got {type(document).__name__}")
    if "merge_method" in document:
        from orthomerge.runs.mergekit import translate

        document = translate(document, where=str(path))
    return _anchored(document, path.parent)


def parse_value(text: str) -> Any:
    """Parse a value of the command line as in a recipe: numbers, true, lists, mappings."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - as above
    except _NOT_YAML as error:
        raise RecipeError(
            f"cannot read the value {text!r:.60}; write it as YAML, for example 0.3, true or [1, 2]"
        ) from error


class _Loader(yaml.SafeLoader):
    """YAML without aliases and duplicate keys; 1e-3 is a number, as in YAML 1.2."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not allowed in a recipe; write the value out")
        self._depth = getattr(self, "_depth", 0) + 1
        if self._depth > _MOST_DEPTH:
            raise yaml.YAMLError(f"it is nested more than {_MOST_DEPTH} levels deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        names = set[str]()
        for key, _ in node.value:
            name = str(self.construct_object(key, deep=True))
            if name in names:
                raise yaml.YAMLError(f"{name!r} is given twice (line {key.start_mark.line + 1})")
            names.add(name)
        return mapping


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _anchored(document: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Join relative paths of a recipe to `folder`."""
    from orthomerge.data.datasets_hub import names_dataset
    from orthomerge.files.opening import is_hub_id

    changed = dict(document)
    if isinstance(document.get("experts"), dict):
        changed["experts"] = {
            task: {**expert, "path": _anchor(expert["path"], folder, is_hub_id)}
            if isinstance(expert, dict) and "path" in expert
            else _anchor(expert, folder, is_hub_id)
            for task, expert in document["experts"].items()
        }
    if "base" in document:
        changed["base"] = _anchor(document["base"], folder, is_hub_id)
    if isinstance(document.get("out"), str) and not document["out"].startswith("~"):
        changed["out"] = str(folder / document["out"])
    for name in ("align", "fit", "evaluate"):
        section = document.get(name)
        if isinstance(section, dict) and isinstance(section.get("data"), dict):
            data = {task: _anchor(source, folder, names_dataset) for task, source in section["data"].items()}
            changed[name] = {**section, "data": data}
    return changed


def _anchor(reference: Any, folder: Path, is_id: Callable[[str], bool]) -> Any:
    """Join a relative path to `folder`; a possible id of the Hub is kept unless that path exists."""
    if not isinstance(reference, str) or reference.startswith("~"):
        return reference
    path = folder / reference
    if is_id(reference) and not os.path.lexists(path):
        return reference
    return str(path) if path.is_absolute() else f"./{path}"  # never taken for a hub id


def _plain(value: Any) -> Any:
    """Convert a section or an expert to a mapping, and an object in memory to the name of its type."""
    if type(value).__module__.startswith(("orthomerge.runs.", "orthomerge.models.opening")):
        return {name: part for name, part in vars(value).items() if part is not None}
    return dict(value) if isinstance(value, Mapping) else f"a {type(value).__name__} in memory"
