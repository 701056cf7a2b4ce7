"""What a sweep consists of: merges, ways of reading them, and the cells that both make; each that differs once.

A *variant* is one merge: method, options, seed. A *readout* is a protocol or an aligner with all its shots and kinds of
access. A merge that draws at random is made once for every seed, and read with that very seed. One that does not is
made once; few inputs are then drawn once for every seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import RecipeError, nearest
from orthomerge.core.rows import maker_of
from orthomerge.core.schema import schema
from orthomerge.evaluation.protocols import EvaluationProtocol, find_protocol
from orthomerge.merging.methods import find_method
from orthomerge.models.experts import Experts
from orthomerge.runs.blocks import Evaluate, Kind, Reading, Sweep, SweptMethod
from orthomerge.runs.checks import check_recipe
from orthomerge.runs.recipe import Merge, Recipe

if TYPE_CHECKING:
    from orthomerge.data.task import Access, Split
    from orthomerge.evaluation.records import Way


REFERENCES = ("expert", "base")
_NONE = "none"


@dataclass(frozen=True)
class Variant:
    """One merge. `first` and `seeds`: the seeds of its readings. `seen`: which inputs its making saw."""

    method: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    first: int = 0
    seeds: int = 1
    fitted: bool = False
    seen: Access = "data-free"

    @property
    def name(self) -> str:
        """What its records are called; the same for all seeds."""
        return _named(self.method, self.parameters)

    def merge(self, recipe: Recipe) -> Merge:
        """What its weights depend on."""
        seed = recipe.seed + (self.first if self.seeds == 1 else 0)
        return recipe.merge.variant(self.method, self.parameters, seed=seed)


@dataclass(frozen=True)
class Readout:
    """One way of reading, with `asked`: every number of shots (None: all) and kind of access."""

    protocol: str = "current"
    aligner: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    asked: tuple[tuple[int | float | None, Kind], ...] = ()

    @property
    def title(self) -> str:
        return _named(self.aligner or self.protocol, self.options)

    @property
    def teaches(self) -> bool:
        """Whether it looks at the expert."""
        return "expert" in EvaluationProtocol(self.protocol, aligner=self.aligner).needs

    def protocols(self, *, first: int, seeds: int, support: Split) -> list[EvaluationProtocol]:
        """How a model is scored; as often as there are seeds if few inputs are drawn, else once."""
        if not self.asked:
            return [EvaluationProtocol(self.protocol, self.options, first=first)]
        return [
            EvaluationProtocol(
                self.protocol,
                self.options,
                shots,
                1 if shots is None else seeds,
                kind,
                support,
                self.aligner,
                first=first,
            )
            for shots, kind in self.asked
        ]


@dataclass(frozen=True)
class Cell:
    """One merge read in one way with one seed."""

    variant: Variant
    way: Way
    seed: int

    @property
    def title(self) -> str:
        return f"{self.variant.name}, {self.way.title} ({self.way.access})"


def sweep_of(recipe: Recipe) -> tuple[Sweep, Evaluate]:
    """Both sections that a sweep needs; sections that have no meaning in it are refused."""
    if recipe.sweep is None or recipe.evaluate is None:
        raise RecipeError("the recipe has no block 'sweep'; add one, with the methods to try (docs/sweeps.md)")
    ways = {
        "align": "'aligners' of the sweep align",
        "out": "'keep: true' in 'sweep' keeps the models in the run folder",
        "diagnose": "diagnose the model that the sweep chooses in a run of its own",
    }
    for name, way in ways.items():
        if getattr(recipe, name) not in (None, False):
            raise RecipeError(f"{name!r} has no place in a sweep: {way}; leave {name!r} out")
    if recipe.sweep.methods and recipe.parameters:
        raise RecipeError(
            "'parameters' are of 'method'; a sweep with 'methods' has them there: {method: ties, parameters: {...}}"
        )
    return recipe.sweep, recipe.evaluate


def splits_of(block: Sweep, scored: Evaluate) -> tuple[str, ...]:
    """What is scored: test, and val where the best is chosen there. Data is read for it."""
    from orthomerge.data.reading import read_task

    missing = []
    for name, source in scored.data.items():
        task = read_task(source) if isinstance(source, str) else source
        if task["test"].labels is None:
            raise RecipeError(f"the test split of {name!r} has no labels; accuracy needs them")
        if "val" not in task.splits or task["val"].labels is None or not len(task["val"]):
            missing.append(name)
    why = ""
    if missing:
        why = f"{missing[0]!r} has no labelled val split"
    elif scored.support == "val":
        why = "the val split is what the readings are fitted to ('support')"
    if block.choose == "val" and why:
        raise RecipeError(f"the best cannot be chosen on val: {why}; change that, or say 'choose: test'")
    return ("test",) if why or block.choose == "test" else ("test", "val")


def variants_of(recipe: Recipe) -> list[Variant]:
    """Every merge that differs from the others, in the order of the block."""
    block, _ = sweep_of(recipe)
    variants: dict[tuple[str, int], Variant] = {}
    for item in block.methods or (SweptMethod(recipe.method, recipe.parameters),):
        swept = SweptMethod(item) if isinstance(item, str) else item
        for variant in _variants(recipe, block, swept):
            variants.setdefault((variant.name, variant.first), variant)
    return list(variants.values())


def _variants(recipe: Recipe, block: Sweep, swept: SweptMethod) -> Iterator[Variant]:
    row = find_method(swept.method)
    options = schema(maker_of(row)).keys() - swept.parameters.keys()
    scaled = "scale" in options and block.scales
    drawn = row.fitted or "seed" in options
    seen: Access = "data-free"
    if row.fitted:
        seen = "transductive" if recipe.fit is not None and recipe.fit.split == "test" else "inductive"
    for scale in block.scales if scaled else (None,):
        parameters = dict(swept.parameters) if scale is None else {**swept.parameters, "scale": scale}
        for seed in range(block.seeds if drawn else 1):
            seeds = 1 if drawn else block.seeds
            yield Variant(swept.method, parameters, seed, seeds, row.fitted, seen)


def readouts_of(recipe: Recipe) -> list[Readout]:
    """Every way of reading: the protocols of `evaluate` where it names some, and the aligners; no question twice."""
    block, scored = sweep_of(recipe)
    readings = () if scored.protocols == Evaluate.protocols else scored.readings
    for reading in readings:
        if reading.seeds != Reading.seeds:
            raise RecipeError("the 'seeds' of a sweep count for all its readings; leave 'seeds' of the protocol out")
    swept = tuple(
        Reading() if name == _NONE else Reading(aligner=name, shots=block.shots, access=block.access)
        for name in block.aligners
    )
    seen = set[str]()
    readouts = (_readout(reading, aligner, seen) for reading in (*readings, *swept) for aligner in reading.aligners)
    return [readout for readout in readouts if readout is not None]


def _readout(reading: Reading, aligner: str | None, seen: set[str]) -> Readout | None:
    """A reading without the questions in `seen`, to which it adds its own; its names and options must exist."""
    EvaluationProtocol(reading.protocol, reading.options, aligner=aligner).builder()  # checks names and options
    if aligner is None and not find_protocol(reading.protocol).needs:
        key = json.dumps([reading.protocol, reading.options], sort_keys=True)
        new = key not in seen
        seen.add(key)
        return Readout(reading.protocol, None, reading.options) if new else None
    asked = []
    for shots in reading.counts:
        for kind in reading.kinds:
            key = json.dumps([reading.protocol, aligner, reading.options, shots, kind], sort_keys=True)
            if key not in seen:
                asked.append((shots, kind))
                seen.add(key)
    return Readout(reading.protocol, aligner, reading.options, tuple(asked)) if asked else None


def cells_of(recipe: Recipe) -> list[Cell]:
    """All cells, merge by merge."""
    _, scored = sweep_of(recipe)
    readouts = readouts_of(recipe)
    return [
        Cell(variant, protocol.way(variant.seen), seed)
        for variant in variants_of(recipe)
        for readout in readouts
        for protocol in readout.protocols(first=variant.first, seeds=variant.seeds, support=scored.support)
        for seed in range(protocol.first, protocol.first + protocol.seeds)
    ]


def check_sweep(recipe: Recipe) -> tuple[list[Cell], Experts]:
    """The cells and the opened experts, after every name and number was checked; headers are read, inputs are not."""
    _, scored = sweep_of(recipe)
    variants, cells = variants_of(recipe), cells_of(recipe)
    if recipe.fit is not None and not any(variant.fitted for variant in variants):
        raise RecipeError("'fit' has inputs, but no method of the sweep is fitted; name one, or leave 'fit' out")
    names = [variant.name for variant in variants] + list(REFERENCES)
    if scored.against is not None and scored.against not in names:
        raise RecipeError(f"there is no {scored.against!r} to compare with; {nearest(scored.against, names)}")
    return cells, check_recipe(recipe, merges=[variant.merge(recipe) for variant in variants])


def _named(name: str, options: Mapping[str, Any]) -> str:
    """A name with options, as in a row of a table."""
    return " ".join((name, *(f"{key}={_short(value)}" for key, value in options.items())))


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))
