"""What a model consists of: an encoder, a head per task, how inputs are processed, and how it was made.

A few encoders are kept in memory as modules, so that a model that is used twice is computed and built once.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from orthomerge.core.errors import IncompatibleError, RecipeError, nearest
from orthomerge.data.task import Access
from orthomerge.files.checkpoint import Spec
from orthomerge.models.family import Family
from orthomerge.models.heads import Extra, Head
from orthomerge.models.processors import ProcessorSource
from orthomerge.models.skeleton import Skeleton
from orthomerge.models.sources import Opened
from orthomerge.models.tensors import FileTensors, HashedTensors, Tensors, content_digest

if TYPE_CHECKING:
    import torch


_MOST_KEPT = 2  # modules in memory at a time: a merge and the expert that it is compared with


@dataclass(eq=False)
class Encoder:
    """The weights of a model with what is needed to run them.

    `config`: of the family's encoder class. `start`: of a linearised encoder, the weights it is linear around.
    `content`: the hash of the one file that the tensors would be written to, once something has read all of them.
    """

    family: Family
    config: Mapping[str, Any]
    tensors: Tensors
    start: Tensors | None = None
    content: str | None = None

    @property
    def digest(self) -> str:
        """Hash of tensors and config; paths, options and heads do not count."""
        if self.content is None:
            if isinstance(self.tensors, FileTensors) or not self.family.encoder_class:
                self.content = content_digest(self.tensors, self.family.prefix)
            else:
                loaded(self)  # computes the weights once for both
        parts = [self.family.name, self.content, self.config]
        if self.start is not None:
            parts.append(content_digest(self.start, self.family.prefix))
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def runner(self, pooling: str) -> tuple[Any, Family]:
        """The module that computes features, shared with other callers, and the family that says how it is read."""
        if self.start is None:
            return loaded(self).module, self.family
        from orthomerge.models.networks import tangent

        return tangent(self.family, self.config, self.start, self.tensors, pooling)

    def module(self) -> torch.nn.Module:
        """A new module with these weights, in eval mode, on the CPU."""
        if self.start is not None:
            raise RecipeError(
                "a linearised model is a tangent, which stock classes cannot run; use predict or evaluate"
            )
        skeleton = Skeleton.build(self.family, self.config, dict(self.tensors.specs))
        skeleton.fill(self.tensors)
        return skeleton.module


def loaded(encoder: Encoder) -> Skeleton:
    """A module with the weights of an encoder, shared by all callers; nothing but its device may be changed.

    The last two are kept, and refilled where the next encoder has the same architecture.
    """
    skeleton = next((skeleton for skeleton, owner in _kept if owner() is encoder), None)
    if skeleton is None:
        specs = dict(encoder.tensors.specs)
        skeleton = unshared(encoder.family, encoder.config, specs)
        skeleton.module.to("cpu")
        hashed = HashedTensors(encoder.tensors, encoder.family.prefix)
        skeleton.fill(encoder.tensors if encoder.content else hashed)
        encoder.content = encoder.content or hashed.digest()
    _kept[:] = [each for each in _kept if each[0] is not skeleton]
    _kept.append((skeleton, weakref.ref(encoder)))
    return skeleton


def finished(encoder: Encoder) -> None:
    """Let the module of an encoder be refilled for the next one of its architecture."""
    _kept[:] = [(skeleton, (lambda: None) if owner() is encoder else owner) for skeleton, owner in _kept]


def unshared(family: Family, config: Mapping[str, Any], specs: Mapping[str, Spec]) -> Skeleton:
    """A module with arbitrary weights for this caller alone: a kept one that is no longer used, else a new one."""
    free = [skeleton for skeleton, owner in _kept if owner() is None]
    if len(_kept) - len(free) >= _MOST_KEPT:
        free.append(next(skeleton for skeleton, owner in _kept if owner() is not None))
    _kept[:] = [each for each in _kept if each[0] not in free]
    same = next((each for each in free if (each.family, each.config, each.specs) == (family, config, specs)), None)
    return same or Skeleton.build(family, config, specs)


def release() -> None:
    """Release all modules in memory."""
    _kept.clear()


_kept: list[tuple[Skeleton, Callable[[], Encoder | None]]] = []  # with whose weights they hold; the last used is last


@dataclass(frozen=True, eq=False)
class Origin:
    """How a model was made, as plain data.

    `facts`: method, seed, notes, and what a fit, an alignment or an evaluation adds. `experts`: what it was made from,
    if that is still open. `record`: what a saved model says of that (hashes, how each expert was opened). `places`:
    the paths of experts and, under "", of the base, from a local file that is never pushed. `inputs`: short hashes of
    the inputs seen, by task.
    """

    facts: Mapping[str, Any]
    experts: Opened | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def access(self) -> Access:
        """Which inputs were used: none, unless the model was fitted or its heads were aligned."""
        seen: list[Access] = [self.facts[stage]["access"] for stage in ("fit", "alignment") if stage in self.facts]
        return "transductive" if "transductive" in seen else seen[0] if seen else "data-free"


@dataclass(frozen=True, eq=False)
class ModelData:
    """The content of a `Model`, which adds what one does with it: run, predict, save.

    `heads`: by task; most are a `Head`, some aligners add a module in front of one.
    """

    encoder: Encoder
    heads: Mapping[str, Head | Extra]
    processor: ProcessorSource
    origin: Origin

    def __repr__(self) -> str:
        sizes = ", ".join(f"{task} {len(head.labels)}" for task, head in self.heads.items())
        count = f"{len(self.heads)} task{'s' if len(self.heads) != 1 else ''}"
        return f"Model({self.family.name}, {count}{': ' if sizes else ''}{sizes}; {self.title})"

    @property
    def family(self) -> Family:
        return self.encoder.family

    @property
    def config(self) -> Mapping[str, Any]:
        return self.encoder.config

    @property
    def weights(self) -> Tensors:
        return self.encoder.tensors

    @property
    def digest(self) -> str:
        """Hash of the encoder's content."""
        return self.encoder.digest

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.heads)

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        return {task: head.labels for task, head in self.heads.items()}

    @property
    def title(self) -> str:
        """The method that made it, and the aligner of its heads if they were aligned."""
        name: str = self.origin.facts["method"]["name"]
        aligned = self.origin.facts.get("alignment")
        return f"{name} + {aligned['aligner']}" if aligned else name

    def head(self, task: str) -> Head | Extra:
        """The classifier of a task; an unknown name offers the nearest."""
        if task not in self.heads:
            raise RecipeError(f"there is no task {task!r}; {nearest(task, self.heads)}")
        return self.heads[task]

    def with_heads(self, heads: Mapping[str, Head | Extra], origin: Origin | None = None) -> Self:
        return replace(self, heads=dict(heads), origin=origin or self.origin)

    def linearised(self, base: ModelData) -> Self:
        """A merge of `linearised` or `tau_jp` experts as the linear model that it is, around the experts' base."""
        if odd := sorted(base.weights.specs.keys() ^ self.weights.specs.keys()):
            raise IncompatibleError(f"only one of base and model has the tensor {odd[0]!r}; give the experts' own base")
        return replace(self, encoder=replace(self.encoder, start=base.weights))
