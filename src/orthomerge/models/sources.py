"""Opening and comparison of base and experts: only headers are read, and all problems are listed at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self, cast

from orthomerge.core.errors import NumericalError, RecipeError, some
from orthomerge.files.checkpoint import Checkpoint, Spec, is_float
from orthomerge.files.lora import Adapter
from orthomerge.files.opening import open_checkpoint, open_expert
from orthomerge.models.families import family as find_family
from orthomerge.models.families import family_for, generic
from orthomerge.models.family import Family, HeadLayout
from orthomerge.models.heads import Head
from orthomerge.models.opening import HeadNames, Live, Opening, live_checkpoint
from orthomerge.models.problems import Problem, base_problems, check_problems, code_problem, collected, source_problems
from orthomerge.models.processors import ProcessorSource
from orthomerge.models.skeleton import encoder_config
from orthomerge.models.split import (
    Source,
    Split,
    model_config,
    split_base,
    split_expert,
    stored_labels,
    with_stock_names,
)
from orthomerge.models.tensors import AdaptedTensors, FileTensors, Tensors


@dataclass(frozen=True)
class Parts:
    """Base and experts, split. `merged`, `copied`: specs of the encoder's tensors by canonical name."""

    family: Family
    base: Checkpoint
    base_split: Split
    sources: Mapping[str, Source]
    merged: Mapping[str, Spec]
    copied: Mapping[str, Spec]


class Opened:
    """Opened base and experts; if there are problems, only `problems`, `notes` and `partial` can be read.

    `live`: models in memory by task, the base under "". `partial`: the parts that could be opened, or None.
    """

    def __init__(self, opening: Opening, live: Mapping[str, Live] | None = None) -> None:
        self.opening, self.live = opening, live or {}
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.partial = self._open()

    def __repr__(self) -> str:
        count = len(self.problems)
        family = self.partial.family.title if self.partial else "unknown"
        return f"Experts({len(self.tasks)} of {family} base, {count or 'no'} problem{'s' if count != 1 else ''})"

    def check(self) -> Self:
        """Return self; if there are problems, raise an error that lists them all."""
        check_problems(self.problems)
        return self

    @property
    def parts(self) -> Parts:
        self.check()
        return cast("Parts", self.partial)  # not None if there are no problems

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.opening.experts)

    @property
    def family(self) -> Family:
        return self.parts.family

    @property
    def has_base(self) -> bool:
        """Whether a base was given; if not, names and config are the first expert's."""
        return self.opening.base is not None

    @cached_property
    def heads(self) -> dict[str, Head]:
        return {task: _read_head(self.parts.base, source) for task, source in self.parts.sources.items()}

    @cached_property
    def processor(self) -> ProcessorSource:
        """Source of the processor: the base, or else the first expert with files of one."""
        for name in ("", *self.tasks):
            if name in self.live and self.live[name].processor is not None:
                return ProcessorSource(self.family.modality, self.config, live=self.live[name].processor)
        folders = [checkpoint.path for checkpoint in self.checkpoints().values() if not checkpoint.in_memory]
        return ProcessorSource.of(folders, self.family.modality, self.config)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Config of the encoder: the base's, or else that of the first expert with one."""
        configs = (self.parts.base.config, *(source.config for source in self.parts.sources.values()))
        return encoder_config(next((config for config in configs if config), {}), self.family)

    @property
    def specs(self) -> Mapping[str, Spec]:
        """Specs of a merge in the base's dtypes, in writing order."""
        return self.tensors("").specs

    def checkpoints(self) -> dict[str, Checkpoint | Adapter]:
        """Return the checkpoints of all experts by task, and that of the base under ""."""
        return {"": self.parts.base, **{task: source.checkpoint for task, source in self.parts.sources.items()}}

    def tensors(self, task: str) -> Tensors:
        """Return the encoder of an expert, or of the base (""); tensors that an expert lacks are the base's."""
        parts = self.parts
        base = {key: (parts.base, name) for key, name in parts.base_split.names.items()}
        if not task:
            return FileTensors(base)
        checkpoint, names = parts.sources[task].checkpoint, parts.sources[task].split.names
        if isinstance(checkpoint, Adapter):
            return AdaptedTensors(FileTensors(base), checkpoint.under(names))
        return FileTensors({**base, **{key: (checkpoint, name) for key, name in names.items()}})

    def _open(self) -> Parts | None:
        opened: dict[str, Checkpoint | Adapter] = {}
        for task, expert in self.opening.experts.items():
            with collected(self.problems, f"expert {task!r}"):
                live = self.live.get(task)
                opened[task] = open_expert(expert.path) if live is None else live_checkpoint(task, live)
        base = self._base(opened)
        if base is None:
            return None
        self._add_notes(opened, base)
        for role, source in (("base", base), *((f"expert {task!r}", source) for task, source in opened.items())):
            self.problems += code_problem(f"{role} ({source.path})", source, self.opening.family)
        family = None
        with collected(self.problems, "family"):
            family = _family_of(self.opening, base, opened)
        return None if family is None else self._compare(base, opened, family)

    def _base(self, opened: Mapping[str, Checkpoint | Adapter]) -> Checkpoint | None:
        with collected(self.problems, "base"):
            if "" in self.live:
                return live_checkpoint("base", self.live[""])
            if self.opening.base is not None:
                return open_checkpoint(self.opening.base)
            if any(isinstance(source, Adapter) for source in opened.values()):
                raise RecipeError("an adapter needs the model that the experts were fine-tuned from; give it as 'base'")
            for source in opened.values():
                if isinstance(source, Checkpoint):
                    self.notes.append("no base was given; names and config are the first expert's")
                    return source
        return None

    def _add_notes(self, opened: Mapping[str, Checkpoint | Adapter], base: Checkpoint) -> None:
        tasks: dict[str, list[str]] = {}
        for task, source in (*opened.items(), *([("the base", base)] if self.opening.base else [])):
            tasks.setdefault(str(source.path), []).append(task)
        self.notes += [f"{some(roles)} are the same model, {path}" for path, roles in tasks.items() if len(roles) > 1]
        modes = {task: _mapping(source.config, "orthomerge").get("mode") for task, source in opened.items()}
        if linear := [task for task, mode in modes.items() if mode in ("linearised", "tau_jp")]:
            self.notes.append(
                f"{some(linear)} was trained as a linearised model; evaluate, export and align treat the merge as an "
                "ordinary network, `Model.linearised` gives the linear model"
            )

    def _compare(self, base: Checkpoint, opened: Mapping[str, Checkpoint | Adapter], family: Family) -> Parts:
        base = family.adapted(base)
        prefix = family.prefix if self.opening.encoder_prefix else None
        split = split_base(base.specs, family, prefix=prefix, ignore=self.opening.ignore)
        self.problems += base_problems(base, split)
        reference = {key: base.spec(name) for key, name in split.names.items()}
        sources: dict[str, Source] = {}
        for task, checkpoint in opened.items():
            source = self._split_source(task, with_stock_names(checkpoint, family), family, reference)
            where = f"expert {task!r} ({checkpoint.path})"
            self.problems += source_problems(where, source, reference, family, base, missing=self.opening.missing)
            sources[task] = source
        changed = {key for source in sources.values() for key in source.split.names}
        if any(isinstance(source.checkpoint, Adapter) for source in sources.values()):
            changed |= reference.keys()  # an adapter has zero deltas elsewhere, which count in a trim
        merged = {key: spec for key, spec in reference.items() if is_float(spec.dtype) and key in changed}
        copied = {key: spec for key, spec in reference.items() if key not in merged}
        if unchanged := [key for key, spec in copied.items() if is_float(spec.dtype)]:
            self.notes.append(f"no expert changes {some(unchanged)}; copied from the base")
        return Parts(family, base, split, sources, merged, copied)

    def _split_source(
        self, task: str, checkpoint: Checkpoint | Adapter, family: Family, reference: Mapping[str, Spec]
    ) -> Source:
        expert, specs, config = self.opening.experts[task], checkpoint.specs, model_config(checkpoint)
        pooling, max_length = self._reading(config, family)
        named = expert.head or HeadNames()
        layout = HeadLayout(named.layers, named.activation) if named.layers else family.head
        split = split_expert(
            specs, family, reference, pooling=pooling, prefix=expert.prefix, layout=layout, ignore=self.opening.ignore
        )
        labels = expert.labels or named.classes or ()
        if not labels:
            with collected(self.problems, f"expert {task!r} ({checkpoint.path})"):
                labels = stored_labels(config, specs, split)
        return Source(expert, checkpoint, config, split, layout, labels, pooling, max_length)

    def _reading(self, config: Mapping[str, Any], family: Family) -> tuple[str, int | None]:
        record = _mapping(config, "orthomerge")
        recorded, length = record.get("pooling"), _mapping(record, "tuning").get("max_length")
        pooling = self.opening.pooling or (recorded if isinstance(recorded, str) else None) or family.default_pooling
        if pooling not in family.poolings:
            text = f"{family.name} has no pooling {pooling!r}"
            problem = Problem("pooling", text, f"use one of {', '.join(family.poolings)}", RecipeError)
            self.problems += [] if problem in self.problems else [problem]
            pooling = family.default_pooling
        return pooling, length if family.modality == "text" and type(length) is int and length > 0 else None


def _mapping(config: Mapping[str, Any] | None, key: str) -> Mapping[str, Any]:
    value = (config or {}).get(key)
    return value if isinstance(value, dict) else {}


def _family_of(opening: Opening, base: Checkpoint, opened: Mapping[str, Checkpoint | Adapter]) -> Family:
    if opening.family == "generic" or (opening.family is None and opening.encoder_prefix is not None):
        return generic(opening.encoder_prefix or "")
    if opening.family is not None:
        return find_family(opening.family)
    configs = [source.config or {} for source in (base, *opened.values()) if isinstance(source, Checkpoint)]
    kind = next((config["model_type"] for config in configs if "model_type" in config), None)
    if kind is None:
        raise RecipeError(
            "no config.json has a 'model_type', so the family is unknown; "
            "name it as 'family' (bert, vit, ... or generic with 'encoder_prefix')"
        )
    # Two families share a model type: the tensors of an expert tell them apart, those of a base do not.
    keys = [name for source in opened.values() for name in source.specs]
    return family_for(str(kind), keys or list(base))


def _read_head(base: Checkpoint, source: Source) -> Head:
    import torch

    if source.layout is None:
        from orthomerge.models.zero_shot import zero_shot_head

        head = zero_shot_head(base.path, source.labels, (source.expert.head or HeadNames()).templates)
        return replace(head, pooling=source.pooling)
    tensors: dict[str, torch.Tensor] = {}
    for part, name in source.split.head.items():
        entry = source.checkpoint.entry(name)
        tensors[part] = entry.read(0, entry.spec.numel).reshape(entry.spec.shape)
        if not torch.isfinite(tensors[part].float()).all():
            raise NumericalError(
                f"{entry.file.path}: the head's {name!r} holds NaN or infinity; find a sound checkpoint"
            )
    fields = {"activation": source.layout.activation, "pooling": source.pooling, "max_length": source.max_length}
    return Head.of(tensors, source.labels, **fields)
