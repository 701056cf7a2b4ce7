"""Base and experts, opened and compared: headers only, every tensor accounted for, every problem listed at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, TypeVar

from orthomerge.core.errors import OrthomergeError, RecipeError, some
from orthomerge.files.checkpoint import Checkpoint, Spec, is_float
from orthomerge.files.lora import Adapter
from orthomerge.files.opening import open_checkpoint, open_expert
from orthomerge.models.opening import live_checkpoint
from orthomerge.models.problems import Problem, base_problems, code_problems, source_problems
from orthomerge.models.processors import ProcessorSource
from orthomerge.models.skeleton import encoder_config
from orthomerge.models.sources import (
    Parts,
    Source,
    choose_family,
    head_layout,
    linearised_experts,
    merged_and_copied,
    model_config,
    read_head,
    shared_checkpoints,
    specs_of,
    stored_labels,
    with_stock_names,
)
from orthomerge.models.split import split_base, split_expert
from orthomerge.models.tensors import AdaptedTensors, FileTensors, in_writing_order

if TYPE_CHECKING:
    from orthomerge.models.family import Family
    from orthomerge.models.heads import Head
    from orthomerge.models.opening import Live, Opening
    from orthomerge.models.tensors import Tensors


Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class Opened:
    """Base and experts as they were opened; where there are problems, only `problems` and `notes` can be asked for.

    `found`: what could be opened, problems or not.
    """

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

    @classmethod
    def of(cls, opening: Opening, live: Mapping[str, Live]) -> Self:
        """Open everything, split it, and compare it."""
        opener = _Opener(opening, live)
        parts = opener.parts()
        return cls(opening, tuple(opener.problems), tuple(opener.notes), parts, live)

    def check(self) -> Self:
        """The same; if there are problems, an error that lists them all."""
        if len(self.problems) > 1:
            lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1))
            raise self.problems[0].error(f"{len(self.problems)} problems:\n{lines}")
        if self.problems:
            raise self.problems[0].error(str(self.problems[0]))
        return self

    def with_problems(self, problems: tuple[Problem, ...]) -> Self:
        """The same with other problems."""
        return replace(self, problems=problems)

    @property
    def parts(self) -> Parts:
        """Base and experts, split, if nothing is wrong with them."""
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
        return {task: read_head(parts.base, source) for task, source in parts.sources.items()}

    @cached_property
    def processor(self) -> ProcessorSource:
        """How inputs are processed: as beside the base, else as beside the first expert that says."""
        live = [self.live[name].processor for name in ("", *self.tasks) if name in self.live]
        chosen = next((processor for processor in live if processor is not None), None)
        opened = [] if chosen is not None else self.checkpoints().values()
        folders = [checkpoint.path for checkpoint in opened if not checkpoint.in_memory]
        return ProcessorSource.of(folders, self.family.modality, self.config, live=chosen)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The config of the encoder: the base's, else that of the first expert that has one."""
        parts = self.parts
        configs = [parts.base.config, *(source.config for source in parts.sources.values())]
        config = next((config for config in configs if config), None)
        return encoder_config(config, parts.family) if config else {}

    @property
    def specs(self) -> dict[str, Spec]:
        """Every tensor of a merge that keeps the base's dtypes, in writing order."""
        return in_writing_order({**self.parts.merged, **self.parts.copied})

    def checkpoints(self) -> dict[str, Checkpoint | Adapter]:
        """Everything that was opened, by its role."""
        parts = self.parts
        return {"base": parts.base, **{f"expert {task}": source.checkpoint for task, source in parts.sources.items()}}

    def tensors(self, task: str) -> Tensors:
        """The encoder of an expert, or under "" of the base: its own bytes, and the base's where it has none."""
        parts = self.parts
        base = {key: (parts.base, name) for key, name in parts.base_split.names.items()}
        if not task:
            return FileTensors(base)
        checkpoint, names = parts.sources[task].checkpoint, parts.sources[task].split.names
        if isinstance(checkpoint, Adapter):
            return AdaptedTensors(FileTensors(base), checkpoint.under(names))
        return FileTensors({**base, **{key: (checkpoint, name) for key, name in names.items()}})


class _Opener:
    """One opening; problems and notes are collected on the way."""

    def __init__(self, opening: Opening, live: Mapping[str, Live]) -> None:
        self.opening, self.live = opening, live
        self.problems: list[Problem] = []
        self.notes: list[str] = []

    def parts(self) -> Parts | None:
        opened: dict[str, Checkpoint | Adapter] = {}
        for task in self.opening.experts:
            source = self._attempt(f"expert {task!r}", lambda task=task: self._open(task))  # type: ignore[misc]
            if source is not None:
                opened[task] = source
        base = self._open_base(opened)
        self.notes += shared_checkpoints({**opened, **({"the base": base} if base and self.opening.base else {})})
        if base is None:
            return None
        for role, source in (("base", base), *((f"expert {task!r}", source) for task, source in opened.items())):
            self.problems += code_problems(f"{role} ({source.path})", source, self.opening.family)
        family = self._attempt("family", lambda: choose_family(self.opening, base, opened))
        if family is None:
            return None
        if linear := linearised_experts(opened):
            self.notes.append(
                f"{some(linear)}: linearised, so what was trained is a linear model; evaluate, export and align read "
                "the merge as the ordinary network, `Model.linearised` as the linear one"
            )
        return self._compare(family.adapted(base), opened, family)

    def _attempt(self, where: str, action: Callable[[], Value]) -> Value | None:
        """Run one step; what it raises becomes a problem."""
        try:
            return action()
        except OrthomergeError as error:
            self.problems.append(Problem.of(where, error))
            return None

    def _open(self, task: str) -> Checkpoint | Adapter:
        if task in self.live:
            return live_checkpoint(task, self.live[task])
        return open_expert(self.opening.experts[task].path)

    def _open_base(self, opened: Mapping[str, Checkpoint | Adapter]) -> Checkpoint | None:
        if "" in self.live:
            return self._attempt("base", lambda: live_checkpoint("base", self.live[""]))
        path = self.opening.base
        if path is not None:
            return self._attempt("base", lambda: open_checkpoint(path))
        if any(isinstance(source, Adapter) for source in opened.values()):
            what = "an adapter needs the model that the experts were fine-tuned from"
            self.problems.append(Problem("base", what, "give it as 'base'", RecipeError))
            return None
        first = next((source for source in opened.values() if isinstance(source, Checkpoint)), None)
        if first is not None:
            self.notes.append("no base was given; names and config are the first expert's")
        return first

    def _compare(self, base: Checkpoint, opened: Mapping[str, Checkpoint | Adapter], family: Family) -> Parts:
        prefix = family.prefix if self.opening.encoder_prefix else None
        base_split = split_base(specs_of(base), family, prefix=prefix, ignore=self.opening.ignore)
        self.problems += base_problems(base, base_split)
        reference = {key: base.spec(name) for key, name in base_split.names.items()}
        sources = {
            task: self._split(task, with_stock_names(source, family), family=family, base=base, reference=reference)
            for task, source in opened.items()
        }
        merged, copied = merged_and_copied(sources, reference)
        unchanged = [key for key, spec in copied.items() if is_float(spec.dtype)]
        if unchanged:
            self.notes.append(f"no expert changes {some(unchanged)}; copied from the base")
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
        expert = self.opening.experts[task]
        where = f"expert {task!r} ({source.path})"
        pooling, max_length = self._reading(source, family)
        specs, layout = specs_of(source), head_layout(expert, family)
        split = split_expert(
            specs,
            family,
            reference,
            pooling=pooling,
            prefix=expert.prefix,
            layout=layout,
            ignore=self.opening.ignore,
        )
        labels = expert.labels or (expert.head.classes if expert.head else None)
        labels = labels or self._attempt(where, lambda: stored_labels(source, specs, split)) or ()
        opened = Source(expert, source, split, layout, labels, pooling, max_length)
        self.problems += source_problems(
            where, opened, specs=specs, reference=reference, family=family, base=base, missing=self.opening.missing
        )
        return opened

    def _reading(self, source: Checkpoint | Adapter, family: Family) -> tuple[str, int | None]:
        """How a head reads the encoder: as asked, else as the expert says (`orthomerge finetune` writes it down)."""
        about = model_config(source).get("orthomerge")
        notes = about if isinstance(about, dict) else {}
        named = notes.get("pooling")
        pooling = self.opening.pooling or (named if isinstance(named, str) else None) or family.default_pooling
        if pooling not in family.poolings:
            what = f"pooling {pooling!r} is not known for {family.name}"
            problem = Problem("pooling", what, f"use one of {', '.join(family.poolings)}", RecipeError)
            if problem not in self.problems:
                self.problems.append(problem)
            pooling = family.default_pooling
        tuning = notes.get("tuning")
        length = tuning.get("max_length") if isinstance(tuning, dict) else None
        return pooling, length if family.modality == "text" and type(length) is int and length > 0 else None
