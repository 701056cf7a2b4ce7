"""Parts of a model: an encoder, a head per task, the source of its processor, and its origin.

The last encoders are kept in memory as modules, so that a model that is used twice is computed and built once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

from orthomerge.core.errors import IncompatibleError, RecipeError, nearest
from orthomerge.data.task import Access
from orthomerge.models.family import Family
from orthomerge.models.heads import Extra, Head
from orthomerge.models.processors import ProcessorSource
from orthomerge.models.skeleton import Skeleton
from orthomerge.models.sources import Opened
from orthomerge.models.tensors import FileTensors, HashedTensors, Tensors, content_digest

if TYPE_CHECKING:
    import torch


_MOST_LOADED = 2  # modules in memory at a time: a merge and the expert that it is compared with


@dataclass(eq=False)
class Encoder:
    """Weights of a model, with the family and the config needed to run them.

    `config`: of the family's encoder class. `start`: for a linearised encoder, the weights it is linear around.
    `content`: hash of the file that the tensors would be written to, once all of them have been read.
    """

    family: Family
    config: Mapping[str, Any]
    tensors: Tensors
    start: Tensors | None = None
    content: str | None = None

    @property
    def digest(self) -> str:
        """Hash of tensors and config, without paths, options and heads."""
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
        """Return the module that computes features, shared with other callers, and the family to run it with."""
        if self.start is None:
            return loaded(self).module, self.family
        from orthomerge.models.networks import tangent

        return tangent(self.family, self.config, self.start, self.tensors, pooling)

    def module(self) -> torch.nn.Module:
        if self.start is not None:
            raise RecipeError(
                "a linearised model is a tangent, which stock classes cannot run; use predict or evaluate"
            )
        return Skeleton.of(self.family, self.config, self.tensors).module


_loaded: WeakKeyDictionary[Encoder, Skeleton] = WeakKeyDictionary()  # last used last


def loaded(encoder: Encoder) -> Skeleton:
    """Return a module with the weights of an encoder, shared by all callers, who may change only its device."""
    skeleton = _loaded.pop(encoder, None)
    if skeleton is None:
        while len(_loaded) >= _MOST_LOADED:
            release(next(iter(_loaded)))
        hashed = HashedTensors(encoder.tensors, encoder.family.prefix)
        skeleton = Skeleton.of(encoder.family, encoder.config, encoder.tensors if encoder.content else hashed)
        encoder.content = encoder.content or hashed.digest()
    _loaded[encoder] = skeleton
    return skeleton


def release(encoder: Encoder) -> None:
    _loaded.pop(encoder, None)


@dataclass(frozen=True, eq=False)
class Origin:
    """Record of how a model was made, as plain data.

    `facts`: method, seed, notes, and entries of a fit, an alignment or an evaluation. `experts`: None if not open.
    `record`: a saved model's record of its experts (hashes, how each was opened). `places`: the paths of experts and,
    under "", of the base, from a local file that is never pushed. `inputs`: short hashes of the inputs used, by task.
    """

    facts: Mapping[str, Any]
    experts: Opened | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def access(self) -> Access:
        """Access to inputs that was used: data-free, unless the model was fitted or its heads were aligned."""
        used: list[Access] = [self.facts[stage]["access"] for stage in ("fit", "alignment") if stage in self.facts]
        return "transductive" if "transductive" in used else used[0] if used else "data-free"


@dataclass(frozen=True, eq=False)
class ModelData:
    """Content of a `Model`, which adds `module`, `predict` and `save`. `heads`: by task."""

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
        return self.encoder.digest

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.heads)

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        return {task: head.labels for task, head in self.heads.items()}

    @property
    def title(self) -> str:
        """Name of the method that made the model, with the aligner if its heads were aligned."""
        name: str = self.origin.facts["method"]["name"]
        aligned = self.origin.facts.get("alignment")
        return f"{name} + {aligned['aligner']}" if aligned else name

    def head(self, task: str) -> Head | Extra:
        if task not in self.heads:
            raise RecipeError(f"there is no task {task!r}; {nearest(task, self.heads)}")
        return self.heads[task]

    def with_heads(self, heads: Mapping[str, Head | Extra], origin: Origin | None = None) -> Self:
        return replace(self, heads=dict(heads), origin=origin or self.origin)

    def linearised(self, base: ModelData) -> Self:
        """Return a merge of `linearised` or `tau_jp` experts as a model that is linear around the experts' base."""
        if odd := sorted(base.weights.specs.keys() ^ self.weights.specs.keys()):
            raise IncompatibleError(f"only one of base and model has the tensor {odd[0]!r}; give the experts' own base")
        return replace(self, encoder=replace(self.encoder, start=base.weights))
