"""From a recipe to a plan: headers only, every tensor accounted for, every problem found before any work.

A plan never raises for what is wrong with the inputs; it lists all of it, each with a way out. `Plan.check` raises, or
gives the `Job` that the pipeline carries out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from orthomerge.checkpoints.checkpoint import DTYPES, Checkpoint, Spec, is_float
from orthomerge.checkpoints.documents import read_json
from orthomerge.checkpoints.lora import Adapter
from orthomerge.checkpoints.opening import open_checkpoint, open_expert
from orthomerge.errors import IncompatibleError, OrthomergeError, RecipeError, some
from orthomerge.merging.methods import find_method, make_method
from orthomerge.models.families import family as find_family
from orthomerge.models.families import family_for
from orthomerge.models.family import Family, HeadLayout
from orthomerge.models.generic import generic
from orthomerge.models.split import Split, split_base, split_expert
from orthomerge.problems import (
    Problem,
    alignment_problems,
    base_problems,
    code_problems,
    device_problems,
    evaluation_problems,
    expert_problems,
    fit_problems,
    unbuilt_problems,
)
from orthomerge.recipe import DTYPE_NAMES, Expert, Recipe

if TYPE_CHECKING:
    from orthomerge.fitting.kinds import FittedMethod
    from orthomerge.merging.kinds import SurveyMethod, TensorMethod

__all__ = ["ExpertPlan", "Job", "Plan", "make_plan"]

Made = TypeVar("Made")


@dataclass(frozen=True)
class ExpertPlan:
    """One expert, opened and split; `labels` in the order of the head's rows."""

    given: Expert
    source: Checkpoint | Adapter
    split: Split
    layout: HeadLayout | None
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Job:
    """A merge that can be carried out. `merged` and `copied` are the encoder's tensors by canonical name."""

    recipe: Recipe
    method: TensorMethod | SurveyMethod | FittedMethod
    family: Family
    pooling: str
    base: Checkpoint
    base_split: Split
    experts: Mapping[str, ExpertPlan]
    merged: Mapping[str, Spec]
    copied: Mapping[str, Spec]
    notes: tuple[str, ...]

    @cached_property
    def specs(self) -> dict[str, Spec]:
        """Every tensor of the merged encoder in the order of writing: wide elements first, so that all are aligned.

        Then by name, as safetensors itself writes them, so that the shards of the inputs make no difference.
        """
        target = DTYPE_NAMES.get(self.recipe.dtype)
        everything = {
            key: Spec(spec.shape, target) if target and is_float(spec.dtype) else spec
            for key, spec in {**self.merged, **self.copied}.items()
        }
        return dict(sorted(everything.items(), key=lambda item: (-DTYPES[item[1].dtype][0], item[0])))

    @property
    def sources(self) -> dict[str, Checkpoint | Adapter]:
        """Every input by its role."""
        return {"base": self.base, **{f"expert {task}": expert.source for task, expert in self.experts.items()}}

    @property
    def bytes_to_read(self) -> int:
        return sum(file.size for source in self.sources.values() for file in source.files)

    @property
    def bytes_to_write(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())

    @property
    def peak_memory(self) -> int:
        """Bytes of blocks that are under way at once, at the most (the interpreter and torch come on top)."""
        from orthomerge.merging.stream import MEMORY

        matrix = getattr(self.method, "scope", "element") == "matrix"
        largest = max((spec.numel for spec in self.merged.values() if matrix and len(spec.shape) == 2), default=0)
        # A matrix method works in float64 beside the block itself.
        return max(MEMORY, largest * (4 * (len(self.experts) + 4) + 8 * (len(self.experts) + 3)))


@dataclass
class Plan:
    """A recipe looked at: what is wrong with it, and the job as far as it can be told."""

    recipe: Recipe
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    job: Job | None = None

    def check(self) -> Job:
        """The job; if there are problems, an error that lists them all."""
        if len(self.problems) > 1:
            lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1))
            raise self.problems[0].error(f"{len(self.problems)} problems:\n{lines}")
        if self.problems or self.job is None:
            raise self.problems[0].error(str(self.problems[0]))
        return self.job

    def attempt(self, where: str, action: Callable[[], Made]) -> Made | None:
        """Run one step; what it raises becomes a problem."""
        try:
            return action()
        except OrthomergeError as error:
            self.problems.append(Problem.of(where, error))
            return None


def make_plan(recipe: Recipe) -> Plan:
    """Open everything, split it, and compare it."""
    plan = Plan(recipe)
    tasks = tuple(recipe.experts) if recipe.vector is None else ("vector",)
    method = plan.attempt(
        "method", lambda: make_method(recipe.method, recipe.parameters, tasks=tasks, seed=recipe.seed)
    )
    plan.problems += alignment_problems(recipe)
    plan.problems += fit_problems(recipe)
    plan.problems += device_problems(recipe)
    plan.problems += evaluation_problems(recipe)
    opened: dict[str, Checkpoint | Adapter] = {}
    for task, given in recipe.tasks.items():
        found = plan.attempt(f"expert {task!r}", lambda path=given.path: open_expert(path))  # type: ignore[misc]
        if found is not None:
            opened[task] = found
    found_base = _open_base(plan, opened)
    plan.notes += _given_twice({**opened, **({"the base": found_base} if found_base and recipe.base else {})})
    if found_base is None:
        return plan
    for role, source in (("base", found_base), *((f"expert {task!r}", source) for task, source in opened.items())):
        plan.problems += code_problems(f"{role} ({source.path})", source, recipe)
    family = plan.attempt("family", lambda: _choose_family(recipe, found_base, opened))
    if family is None:
        return plan
    plan.problems += unbuilt_problems(recipe, family)
    base = _adapted(found_base, family)
    if linear := _linearised(opened):
        plan.notes.append(
            f"{some(linear)}: linearised, so what was trained is a linear model; evaluate, export and align read the "
            "merge as the ordinary network, orthomerge.tuning.loading.load_linearised as the linear one"
        )
    pooling = recipe.pooling or plan.attempt("pooling", lambda: _told_pooling(opened)) or family.default_pooling
    if pooling not in family.poolings:
        what = f"{pooling!r} is not known for {family.name}"
        plan.problems.append(Problem("pooling", what, f"use one of {', '.join(family.poolings)}", RecipeError))
    base_split = split_base(
        _specs(base), family, prefix=family.prefix if recipe.encoder_prefix else None, ignore=recipe.ignore
    )
    plan.problems += base_problems(base, base_split)
    reference = {key: base.spec(name) for key, name in base_split.names.items()}
    experts = {
        task: _plan_expert(plan, task, source, family=family, pooling=pooling, base=base, reference=reference)
        for task, source in opened.items()
    }
    if method is not None:
        merged, copied = _roles(plan, experts, reference)
        plan.job = Job(
            recipe, method, family, pooling, base, base_split, experts, merged, copied, tuple(plan.notes)
        )  # fmt: skip
    return plan


def _open_base(plan: Plan, opened: Mapping[str, Checkpoint | Adapter]) -> Checkpoint | None:
    recipe = plan.recipe
    if recipe.base is not None:
        return plan.attempt("base", lambda: open_checkpoint(recipe.base or ""))
    row = plan.attempt("method", lambda: find_method(recipe.method)) if not plan.problems else None
    first = next((source for source in opened.values() if isinstance(source, Checkpoint)), None)
    if row is not None and not row.base and first is not None:
        plan.notes.append(f"{recipe.method} needs no base and none was given; names and config are the first expert's")
        return first
    if row is not None:
        who = recipe.method if row.base else "an adapter"
        what = f"{who} needs the model that the experts were fine-tuned from"
        plan.problems.append(Problem("base", what, "give it as 'base'", RecipeError))
    return None


def _choose_family(recipe: Recipe, base: Checkpoint, opened: Mapping[str, Checkpoint | Adapter]) -> Family:
    if recipe.family == "generic" or (recipe.family is None and recipe.encoder_prefix is not None):
        return generic(recipe.encoder_prefix or "")
    if recipe.family is not None:
        return find_family(recipe.family)
    full = [source for source in (base, *opened.values()) if isinstance(source, Checkpoint)]
    configs = [source.config for source in full if source.config and "model_type" in source.config]
    if not configs:
        raise RecipeError(
            "no config.json says what kind of model this is; "
            "name it as 'family' (bert, vit, ... or generic with 'encoder_prefix')"
        )
    # Which of two families with one model type it is shows in an expert, not in the base.
    keys = [name for source in opened.values() for name in _specs(source)]
    return family_for(str(configs[0]["model_type"]), keys or list(base))


def _model_config(source: Checkpoint | Adapter) -> Mapping[str, Any]:
    """What a model says of itself; beside an adapter, its classifier's config.json may lie, as `finetune` writes it."""
    if isinstance(source, Checkpoint):
        return source.config or {}
    path = source.path / "config.json"
    return read_json(path) if path.is_file() else {}


def _told_pooling(opened: Mapping[str, Checkpoint | Adapter]) -> str | None:
    """How the experts say that their features are read; those that `orthomerge finetune` makes do say."""
    told: dict[str, str] = {}
    for task, source in opened.items():
        about = _model_config(source).get("orthomerge")
        if isinstance(about, dict) and isinstance(about.get("pooling"), str):
            told[task] = about["pooling"]
    if len(set(told.values())) > 1:
        raise RecipeError(f"the experts read their features in different ways ({told}); say which with 'pooling'")
    return next(iter(told.values()), None)


def _given_twice(opened: Mapping[str, Checkpoint | Adapter]) -> list[str]:
    """Experts that are one and the same file: fine for a model of several heads, else a slip of the pen."""
    tasks: dict[str, list[str]] = {}
    for task, source in opened.items():
        tasks.setdefault(str(source.path), []).append(task)
    return [f"{some(same)} are one model, {path}" for path, same in tasks.items() if len(same) > 1]


def _linearised(opened: Mapping[str, Checkpoint | Adapter]) -> list[str]:
    """The experts that say of themselves that they are tangent models."""
    about = {task: (source.config or {}).get("orthomerge") for task, source in opened.items()}
    modes = {task: told.get("mode") for task, told in about.items() if isinstance(told, dict)}
    return [task for task, mode in modes.items() if mode in ("linearised", "tau_jp")]


def _adapted(source: Checkpoint, family: Family) -> Checkpoint:
    return family.adapt(source) if family.adapt else source


def _adapted_adapter(adapter: Adapter, family: Family) -> Adapter:
    """Adapters name modules, which transformers 5 renamed without renaming what it saves: use the saved names."""
    if family.adapt is None:
        return adapter
    entries = {**{name: factors.b for name, factors in adapter.factors.items()}, **adapter.replaced}
    adapted = family.adapt(Checkpoint(adapter.path, entries))
    return adapter.renamed(dict(zip(entries, adapted, strict=True)))


def _specs(source: Checkpoint | Adapter) -> dict[str, Spec]:
    if isinstance(source, Adapter):
        return dict(source.specs)
    return {key: source.spec(key) for key in (*source, *source.aliases)}


def _plan_expert(
    plan: Plan,
    task: str,
    source: Checkpoint | Adapter,
    *,
    family: Family,
    pooling: str,
    base: Checkpoint,
    reference: Mapping[str, Spec],
) -> ExpertPlan:
    given, ignore = plan.recipe.tasks[task], plan.recipe.ignore
    source = _adapted(source, family) if isinstance(source, Checkpoint) else _adapted_adapter(source, family)
    specs = _specs(source)
    layout = _layout(given, family)
    split = split_expert(
        specs, family, reference, pooling=pooling, prefix=given.prefix, layout=layout, ignore=ignore
    )  # fmt: skip
    classes = given.head.classes if given.head else None
    where = f"expert {task!r} ({source.path})"
    labels = given.labels or classes or plan.attempt(where, lambda: _labels(source, specs, split)) or ()
    expert = ExpertPlan(given, source, split, layout, labels)
    plan.problems += expert_problems(
        where,
        expert,
        specs=specs,
        reference=reference,
        family=family,
        pooling=pooling,
        base=base,
        missing=plan.recipe.missing,
    )
    return expert


def _layout(given: Expert, family: Family) -> HeadLayout | None:
    if given.head is not None and given.head.layers:
        return HeadLayout(given.head.layers, given.head.activation, bool(family.head and family.head.normalise))
    return family.head


def _labels(source: Checkpoint | Adapter, specs: Mapping[str, Spec], split: Split) -> tuple[str, ...]:
    """Class names in the order of the rows; numbered, as transformers does, when the checkpoint has none."""
    rows = next(iter(specs[split.head["weight"]].shape), 0) if "weight" in split.head else 0
    named = _model_config(source).get("id2label")
    if named and (not isinstance(named, dict) or set(named) != {str(number) for number in range(len(named))}):
        found = some(named) if isinstance(named, dict | list) else repr(named)[:60]
        raise IncompatibleError(f"'id2label' must number the classes from 0 on, it has {found}; give 'labels'")
    if named and (len(named) == rows or not _numbered(named)):
        return tuple(str(named[str(number)]) for number in range(len(named)))
    return tuple(f"LABEL_{number}" for number in range(rows))


def _numbered(named: Mapping[str, Any]) -> bool:
    return all(str(value) == f"LABEL_{key}" for key, value in named.items())


def _roles(
    plan: Plan, experts: Mapping[str, ExpertPlan], reference: Mapping[str, Spec]
) -> tuple[dict[str, Spec], dict[str, Spec]]:
    """Which tensors are merged, and which are copied from the base."""
    held = {key for expert in experts.values() for key in expert.split.names}
    if any(isinstance(expert.source, Adapter) for expert in experts.values()):
        held |= reference.keys()  # an adapter leaves the rest as it is: zero deltas, which count as such in a trim
    merged = {key: spec for key, spec in reference.items() if is_float(spec.dtype) and key in held}
    copied = {key: spec for key, spec in reference.items() if key not in merged}
    unheld = [key for key, spec in copied.items() if is_float(spec.dtype)]
    if unheld:
        plan.notes.append(f"no expert changes {some(unheld)}; copied from the base")
    return merged, copied
