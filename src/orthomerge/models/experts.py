"""Base and experts, opened and compared: headers only, every tensor accounted for, every problem listed at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from orthomerge.core.errors import IncompatibleError, OrthomergeError, RecipeError, some
from orthomerge.files.checkpoint import Checkpoint, Spec, is_float
from orthomerge.files.documents import read_json
from orthomerge.files.links import contained
from orthomerge.files.lora import Adapter, AdapterSource
from orthomerge.files.opening import open_checkpoint, open_expert
from orthomerge.models.config import encoder_config
from orthomerge.models.encoder import Encoder
from orthomerge.models.families import family as find_family
from orthomerge.models.families import family_for
from orthomerge.models.family import Family, HeadLayout
from orthomerge.models.generic import generic
from orthomerge.models.live import Live, live_checkpoint
from orthomerge.models.model import Model, Origin
from orthomerge.models.problems import Problem, base_problems, code_problems, source_problems
from orthomerge.models.processors import ProcessorSource
from orthomerge.models.reading import read_head
from orthomerge.models.split import Split, split_base, split_expert
from orthomerge.models.tensors import AdaptedTensors, FileTensors, in_writing_order

if TYPE_CHECKING:
    from orthomerge.models.heads import Extra, Head
    from orthomerge.models.opening import Expert, Opening
    from orthomerge.models.tensors import Tensors


Value = TypeVar("Value")
_LINEARISED = ("linearised", "tau_jp")


@dataclass(frozen=True)
class Source:
    """One expert, opened and split. `labels` are in the order of the head's rows."""

    given: Expert
    checkpoint: Checkpoint | Adapter
    split: Split
    layout: HeadLayout | None
    labels: tuple[str, ...]
    pooling: str
    max_length: int | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        return model_config(self.checkpoint)


@dataclass(frozen=True)
class Parts:
    """What opening found. `merged` and `copied` are the encoder's tensors by canonical name."""

    family: Family
    base: Checkpoint
    base_split: Split
    sources: Mapping[str, Source]
    merged: Mapping[str, Spec]
    copied: Mapping[str, Spec]


@dataclass(frozen=True, eq=False)
class Experts:
    """A base and source models; where there are problems, only `problems` and `notes` can be asked for."""

    opening: Opening
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    found: Parts | None
    live: Mapping[str, Live]

    def __repr__(self) -> str:
        count = len(self.problems)
        state = "no problems" if not count else f"{count} problem{'s' if count > 1 else ''}"
        family = self.found.family.title if self.found else "unknown"
        return f"Experts({len(self.opening.experts)} of {family} base, {state})"

    def check(self) -> Experts:
        """The same; if there are problems, an error that lists them all."""
        if len(self.problems) > 1:
            lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1))
            raise self.problems[0].error(f"{len(self.problems)} problems:\n{lines}")
        if self.problems:
            raise self.problems[0].error(str(self.problems[0]))
        return self

    def with_problems(self, problems: tuple[Problem, ...]) -> Experts:
        """The same with other problems."""
        return replace(self, problems=problems)

    @property
    def parts(self) -> Parts:
        """What opening found, if nothing is wrong with it."""
        self.check()
        if self.found is None:
            raise AssertionError("experts without problems are opened")
        return self.found

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.opening.experts)

    @property
    def family(self) -> Family:
        return self.parts.family

    @property
    def has_base(self) -> bool:
        """Whether a base was given; else the first expert gives names and config."""
        return self.opening.base is not None

    @cached_property
    def heads(self) -> dict[str, Head]:
        """Every task's own head, read once: heads are small."""
        parts = self.parts
        return {task: read_head(parts.base, source, parts.family) for task, source in parts.sources.items()}

    @cached_property
    def processor(self) -> ProcessorSource:
        """How inputs are processed: as beside the base, else as beside the first expert that says."""
        parts = self.parts
        live = [self.live[name].processor for name in ("", *self.tasks) if name in self.live]
        given = next((processor for processor in live if processor is not None), None)
        paths = [] if given is not None else [path for path in self._folders if path is not None]
        return ProcessorSource.of(paths, parts.family.modality, self.config, live=given)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The config of the encoder: the base's, else that of the first expert that has one."""
        parts = self.parts
        configs = [parts.base.config, *(source.config for source in parts.sources.values())]
        found = next((config for config in configs if config), None)
        return encoder_config(found, parts.family) if found else {}

    @cached_property
    def base(self) -> Model:
        """The base, without heads of its own."""
        parts = self.parts
        tensors = FileTensors({key: (parts.base, name) for key, name in parts.base_split.names.items()})
        return self.model(tensors, {}, Origin({"method": {"name": "base", "parameters": {}}}))

    @cached_property
    def sources(self) -> dict[str, Model]:
        """Every expert as a model: its own bytes, its own head."""
        return {task: self._source(task) for task in self.tasks}

    def teacher(self, task: str) -> Model:
        """The model that owns the head of a task."""
        return self.sources[task]

    def model(self, tensors: Tensors, heads: Mapping[str, Head | Extra], origin: Origin) -> Model:
        """A model of the same family, config and processor, with other weights."""
        return Model(Encoder(self.parts.family, self.config, tensors), heads, self.processor, origin)

    @property
    def specs(self) -> dict[str, Spec]:
        """Every tensor of a merge that keeps the base's dtypes, in writing order."""
        return in_writing_order({**self.parts.merged, **self.parts.copied})

    def checkpoints(self) -> dict[str, Checkpoint | Adapter]:
        """Everything that was opened, by its role."""
        parts = self.parts
        return {"base": parts.base, **{f"expert {task}": source.checkpoint for task, source in parts.sources.items()}}

    @property
    def _folders(self) -> list[Any]:
        return [None if checkpoint.in_memory else checkpoint.path for checkpoint in self.checkpoints().values()]

    def _source(self, task: str) -> Model:
        parts, source = self.parts, self.parts.sources[task]
        names = source.split.names
        places = {key: (parts.base, name) for key, name in parts.base_split.names.items()}
        tensors: Tensors
        if isinstance(source.checkpoint, Adapter):
            tensors = AdaptedTensors(FileTensors(places), AdapterSource(source.checkpoint, names))
        else:
            own = {key: (source.checkpoint, name) for key, name in names.items()}
            tensors = FileTensors({**places, **own})
        return self.model(tensors, {task: self.heads[task]}, Origin({"method": {"name": "expert", "parameters": {}}}))


def model_config(source: Checkpoint | Adapter) -> Mapping[str, Any]:
    """What a model says of itself; beside an adapter, its classifier's config.json may lie, as `finetune` writes it."""
    if isinstance(source, Checkpoint):
        return source.config or {}
    path = source.path / "config.json"
    return read_json(contained(path, source.path)) if path.is_file() else {}


def open_experts(opening: Opening, live: Mapping[str, Live] | None = None) -> Experts:
    """Open everything, split it, and compare it. `live`: models in memory by task name, the base under ""."""
    return _Opener(opening, live or {}).open()


class _Opener:
    """One opening; problems and notes are collected on the way."""

    def __init__(self, opening: Opening, live: Mapping[str, Live]) -> None:
        self.opening, self.live = opening, live
        self.problems: list[Problem] = []
        self.notes: list[str] = []

    def open(self) -> Experts:
        found = self._parts()
        return Experts(self.opening, tuple(self.problems), tuple(self.notes), found, self.live)

    def attempt(self, where: str, action: Callable[[], Value]) -> Value | None:
        """Run one step; what it raises becomes a problem."""
        try:
            return action()
        except OrthomergeError as error:
            self.problems.append(Problem.of(where, error))
            return None

    def _parts(self) -> Parts | None:
        opened: dict[str, Checkpoint | Adapter] = {}
        for task, given in self.opening.experts.items():
            source = self.attempt(f"expert {task!r}", lambda task=task, given=given: self._open(task, given))  # type: ignore[misc]
            if source is not None:
                opened[task] = source
        base = self._open_base(opened)
        self.notes += _given_twice({**opened, **({"the base": base} if base and self.opening.base else {})})
        if base is None:
            return None
        for role, source in (("base", base), *((f"expert {task!r}", source) for task, source in opened.items())):
            self.problems += code_problems(f"{role} ({source.path})", source, self.opening.family)
        family = self.attempt("family", lambda: _choose_family(self.opening, base, opened))
        if family is None:
            return None
        if linear := _linearised(opened):
            self.notes.append(
                f"{some(linear)}: linearised, so what was trained is a linear model; evaluate, export and align read "
                "the merge as the ordinary network, orthomerge.models.linearised.linearise as the linear one"
            )
        return self._compare(_adapted(base, family), opened, family)

    def _open(self, task: str, given: Expert) -> Checkpoint | Adapter:
        return live_checkpoint(task, self.live[task]) if task in self.live else open_expert(given.path)

    def _open_base(self, opened: Mapping[str, Checkpoint | Adapter]) -> Checkpoint | None:
        if "" in self.live:
            return self.attempt("base", lambda: live_checkpoint("base", self.live[""]))
        path = self.opening.base
        if path is not None:
            return self.attempt("base", lambda: open_checkpoint(path))
        adapters = [task for task, source in opened.items() if isinstance(source, Adapter)]
        first = next((source for source in opened.values() if isinstance(source, Checkpoint)), None)
        if adapters:
            what = "an adapter needs the model that the experts were fine-tuned from"
            self.problems.append(Problem("base", what, "give it as 'base'", RecipeError))
            return None
        if first is not None:
            self.notes.append("no base was given; names and config are the first expert's")
        return first

    def _compare(self, base: Checkpoint, opened: Mapping[str, Checkpoint | Adapter], family: Family) -> Parts:
        opening = self.opening
        base_split = split_base(
            _specs(base), family, prefix=family.prefix if opening.encoder_prefix else None, ignore=opening.ignore
        )
        self.problems += base_problems(base, base_split)
        reference = {key: base.spec(name) for key, name in base_split.names.items()}
        sources = {
            task: self._split(task, source, family=family, base=base, reference=reference)
            for task, source in opened.items()
        }
        merged, copied = _roles(self.notes, sources, reference)
        return Parts(family, base, base_split, sources, merged, copied)

    def _split(
        self,
        task: str,
        source: Checkpoint | Adapter,
        *,
        family: Family,
        base: Checkpoint,
        reference: Mapping[str, Spec],
    ) -> Source:
        given, ignore = self.opening.experts[task], self.opening.ignore
        source = _adapted(source, family) if isinstance(source, Checkpoint) else _adapted_adapter(source, family)
        where = f"expert {task!r} ({source.path})"
        pooling, max_length = self._reading(where, source, family)
        specs = _specs(source)
        layout = _layout(given, family)
        split = split_expert(
            specs, family, reference, pooling=pooling, prefix=given.prefix, layout=layout, ignore=ignore
        )
        classes = given.head.classes if given.head else None
        labels = given.labels or classes or self.attempt(where, lambda: _labels(source, specs, split)) or ()
        opened = Source(given, source, split, layout, labels, pooling, max_length)
        self.problems += source_problems(
            where, opened, specs=specs, reference=reference, family=family, base=base, missing=self.opening.missing
        )
        return opened

    def _reading(self, where: str, source: Checkpoint | Adapter, family: Family) -> tuple[str, int | None]:
        """How a head reads the encoder: as asked, else as the expert says (`orthomerge finetune` writes it down)."""
        about = model_config(source).get("orthomerge")
        noted = about if isinstance(about, dict) else {}
        named = noted.get("pooling")
        pooling = self.opening.pooling or (named if isinstance(named, str) else None) or family.default_pooling
        if pooling not in family.poolings:
            what = f"pooling {pooling!r} is not known for {family.name}"
            problem = Problem("pooling", what, f"use one of {', '.join(family.poolings)}", RecipeError)
            if problem not in self.problems:
                self.problems.append(problem)
            pooling = family.default_pooling
        tuning = noted.get("tuning")
        length = tuning.get("max_length") if isinstance(tuning, dict) else None
        return pooling, length if family.modality == "text" and type(length) is int and length > 0 else None


def _choose_family(opening: Opening, base: Checkpoint, opened: Mapping[str, Checkpoint | Adapter]) -> Family:
    if opening.family == "generic" or (opening.family is None and opening.encoder_prefix is not None):
        return generic(opening.encoder_prefix or "")
    if opening.family is not None:
        return find_family(opening.family)
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


def _given_twice(opened: Mapping[str, Checkpoint | Adapter]) -> list[str]:
    """Experts that are one and the same file: fine for a model of several heads, else a slip of the pen."""
    tasks: dict[str, list[str]] = {}
    for task, source in opened.items():
        tasks.setdefault(str(source.path), []).append(task)
    return [f"{some(same)} are one model, {path}" for path, same in tasks.items() if len(same) > 1]


def _linearised(opened: Mapping[str, Checkpoint | Adapter]) -> list[str]:
    """The experts that say of themselves that they are tangent models."""
    notes = {task: (source.config or {}).get("orthomerge") for task, source in opened.items()}
    return [task for task, note in notes.items() if isinstance(note, dict) and note.get("mode") in _LINEARISED]


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


def _layout(given: Expert, family: Family) -> HeadLayout | None:
    if given.head is not None and given.head.layers:
        return HeadLayout(given.head.layers, given.head.activation, bool(family.head and family.head.normalise))
    return family.head


def _labels(source: Checkpoint | Adapter, specs: Mapping[str, Spec], split: Split) -> tuple[str, ...]:
    """Class names in the order of the rows; numbered, as transformers does, when the checkpoint has none."""
    rows = next(iter(specs[split.head["weight"]].shape), 0) if "weight" in split.head else 0
    named = model_config(source).get("id2label")
    if isinstance(named, dict):
        named = {str(key): value for key, value in named.items()}  # a live model's config counts in numbers
    if named and (not isinstance(named, dict) or set(named) != {str(number) for number in range(len(named))}):
        keys = some(named) if isinstance(named, dict | list) else repr(named)[:60]
        raise IncompatibleError(f"'id2label' must number the classes from 0 on, it has {keys}; give 'labels'")
    if named and (len(named) == rows or not _numbered(named)):
        return tuple(str(named[str(number)]) for number in range(len(named)))
    return tuple(f"LABEL_{number}" for number in range(rows))


def _numbered(named: Mapping[str, Any]) -> bool:
    return all(str(value) == f"LABEL_{key}" for key, value in named.items())


def _roles(
    notes: list[str], sources: Mapping[str, Source], reference: Mapping[str, Spec]
) -> tuple[dict[str, Spec], dict[str, Spec]]:
    """Which tensors are merged, and which are copied from the base."""
    held = {key for source in sources.values() for key in source.split.names}
    if any(isinstance(source.checkpoint, Adapter) for source in sources.values()):
        held |= reference.keys()  # an adapter leaves the rest as it is: zero deltas, which count as such in a trim
    merged = {key: spec for key, spec in reference.items() if is_float(spec.dtype) and key in held}
    copied = {key: spec for key, spec in reference.items() if key not in merged}
    unheld = [key for key, spec in copied.items() if is_float(spec.dtype)]
    if unheld:
        notes.append(f"no expert changes {some(unheld)}; copied from the base")
    return merged, copied
