"""Variants (merges) of a sweep, the protocols that score them, and their combinations (cells), each once.

A *variant* is one merge: method, options, seed. A random merge is made once per seed and scored with that seed. Any
other merge is made once, and its draws of few inputs are repeated once per seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from orthomerge.core.errors import RecipeError, nearest
from orthomerge.core.schema import maker_of, schema
from orthomerge.data.task import Access, Task
from orthomerge.evaluation.protocols import EvaluationProtocol
from orthomerge.evaluation.records import Way
from orthomerge.merging.methods import find_method
from orthomerge.models.experts import Experts
from orthomerge.runs.models import check_recipe
from orthomerge.runs.recipe import Recipe
from orthomerge.runs.sections import Evaluate, Scoring, Sweep, SweptMethod, protocols_of

REFERENCES = ("expert", "base")
_NO_PLACE = {
    "align": "'aligners' of the sweep align",
    "out": "'keep: true' in 'sweep' keeps the models in the run folder",
    "diagnose": "diagnose the model that the sweep chooses in a run of its own",
}


@dataclass(frozen=True)
class Variant:
    """One merge, scored with `seeds` seeds from `first` on. `seen`: access of the merge to inputs."""

    method: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    first: int = 0
    seeds: int = 1
    seen: Access = "data-free"

    @property
    def name(self) -> str:
        """Name in records, the same for all seeds."""
        return " ".join((self.method, *(f"{key}={_short(value)}" for key, value in self.parameters.items())))

    @property
    def fitted(self) -> bool:
        return self.seen != "data-free"

    def recipe(self, recipe: Recipe) -> Recipe:
        """Return the recipe of this merge alone."""
        seed = recipe.seed + (self.first if self.seeds == 1 else 0)
        return recipe.with_merge(self.method, self.parameters, seed=seed, fitted=self.fitted)


@dataclass(frozen=True)
class Cell:
    """One merge scored by one protocol with one seed."""

    variant: Variant
    way: Way
    seed: int

    @property
    def title(self) -> str:
        return f"{self.variant.name}, {self.way.title} ({self.way.access})"


def sweep_of(recipe: Recipe) -> tuple[Sweep, Evaluate]:
    """Return the sections `sweep` and `evaluate`; refuse sections that a sweep does not use."""
    if recipe.sweep is None or recipe.evaluate is None:
        raise RecipeError("the recipe has no section 'sweep'; add one, with the methods to try (docs/sweeps.md)")
    for name, way in _NO_PLACE.items():
        if getattr(recipe, name) not in (None, False):
            raise RecipeError(f"{name!r} has no place in a sweep: {way}; leave {name!r} out")
    if recipe.sweep.methods and recipe.parameters:
        raise RecipeError(
            "'parameters' are of 'method'; in a sweep, give them in 'methods': {method: ties, parameters: {...}}"
        )
    return recipe.sweep, recipe.evaluate


def splits_of(sweep: Sweep, support: str, tasks: Mapping[str, Task]) -> tuple[str, ...]:
    """Return the splits to score: test, and val if the best is chosen there."""
    why = "the protocols are fitted to the val split ('support')" if support == "val" else ""
    for name, task in tasks.items():
        if task["test"].labels is None:
            raise RecipeError(f"the test split of {name!r} has no labels; accuracy needs them")
        if not why and ("val" not in task.splits or task["val"].labels is None or not len(task["val"])):
            why = f"{name!r} has no labelled val split"
    if sweep.choose == "val" and why:
        raise RecipeError(f"the best cannot be chosen on val: {why}; change that, or set 'choose: test'")
    return ("test",) if why or sweep.choose == "test" else ("test", "val")


def variants_of(recipe: Recipe) -> list[Variant]:
    """Return every distinct merge, in the order of the section."""
    sweep, _ = sweep_of(recipe)
    variants: dict[tuple[str, int], Variant] = {}
    for item in sweep.methods or (SweptMethod(recipe.method, recipe.parameters),):
        for variant in _variants(recipe, sweep, SweptMethod(item) if isinstance(item, str) else item):
            variants.setdefault((variant.name, variant.first), variant)
    return list(variants.values())


def _variants(recipe: Recipe, sweep: Sweep, swept: SweptMethod) -> Iterator[Variant]:
    """Yield a method at every scale, and with every seed if it draws at random."""
    row = find_method(swept.method)
    options = schema(maker_of(row)).keys() - swept.parameters.keys()
    drawn = row.fitted or "seed" in options
    seen: Access = "data-free"
    if row.fitted:
        seen = "transductive" if recipe.fit is not None and recipe.fit.split == "test" else "inductive"
    for scale in sweep.scales if "scale" in options and sweep.scales else (None,):
        parameters = swept.parameters if scale is None else {**swept.parameters, "scale": scale}
        for first in range(sweep.seeds if drawn else 1):
            yield Variant(swept.method, parameters, first, 1 if drawn else sweep.seeds, seen)


def protocols_for(recipe: Recipe, variant: Variant) -> list[EvaluationProtocol]:
    """Return the protocols of a variant: those that `evaluate` names, and the aligners of the sweep."""
    sweep, evaluate = sweep_of(recipe)
    scorings = () if evaluate.protocols == Evaluate.protocols else evaluate.scorings
    for scoring in scorings:
        if scoring.seeds != Scoring.seeds:
            raise RecipeError("the 'seeds' of a sweep count for all protocols; leave out 'seeds' of the protocol")
    aligned = (
        Scoring() if name == "none" else Scoring(aligner=name, shots=sweep.shots, access=sweep.access)
        for name in sweep.aligners
    )
    return [
        replace(protocol, first=variant.first, seeds=1 if protocol.shots is None else variant.seeds)
        for protocol in protocols_of((*scorings, *aligned), evaluate.support)
    ]


def cells_of(recipe: Recipe) -> list[Cell]:
    """Return all cells, in the order of the merges."""
    return [
        Cell(variant, protocol.way(variant.seen), seed)
        for variant in variants_of(recipe)
        for protocol in protocols_for(recipe, variant)
        for seed in range(protocol.first, protocol.first + protocol.seeds)
    ]


def check_sweep(recipe: Recipe) -> tuple[list[Cell], Experts]:
    """Check every name and number from headers; return the cells and the opened experts."""
    _, evaluate = sweep_of(recipe)
    variants, cells = variants_of(recipe), cells_of(recipe)
    if recipe.fit is not None and not any(variant.fitted for variant in variants):
        raise RecipeError("'fit' has inputs, but no method of the sweep is fitted; name one, or leave 'fit' out")
    names = [variant.name for variant in variants] + list(REFERENCES)
    if evaluate.against is not None and evaluate.against not in names:
        raise RecipeError(f"there is no {evaluate.against!r} to compare with; {nearest(evaluate.against, names)}")
    return cells, check_recipe(recipe, merges=[variant.recipe(recipe) for variant in variants])


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))
