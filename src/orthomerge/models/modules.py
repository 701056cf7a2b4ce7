"""The weights of a model with what is needed to run them, and the few encoders in memory that hold such weights."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import RecipeError
from orthomerge.models.skeleton import Skeleton
from orthomerge.models.tensors import ContentHash, FileTensors, content_digest

if TYPE_CHECKING:
    import torch

    from orthomerge.files.checkpoint import Spec
    from orthomerge.models.family import Family
    from orthomerge.models.tensors import Tensors


_MOST_KEPT = 2  # modules in memory at a time: a merge and the expert that it is compared with


@dataclass(eq=False)
class Encoder:
    """`config`: of the family's encoder class. `start`: of a linearised encoder, the weights it is linear around.

    `content`: the hash of the one file that the tensors would be written to, once something has read all of them.
    """

    family: Family
    config: Mapping[str, Any]
    tensors: Tensors
    start: Tensors | None = None
    content: str | None = None

    @property
    def digest(self) -> str:
        """Identity of content: tensors and config; not of paths, options or heads."""
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
        """What gives features: a module that others may use too, and the family that says how it is read."""
        if self.start is None:
            return loaded(self).module, self.family
        from orthomerge.models.linearised import tangent

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
        content = None if encoder.content else ContentHash(specs, encoder.family.prefix)
        skeleton.fill(encoder.tensors, content=content)
        if content is not None:
            encoder.content = content.digest()
    _kept[:] = [each for each in _kept if each[0] is not skeleton]
    _kept.append((skeleton, weakref.ref(encoder)))
    return skeleton


def finished(encoder: Encoder) -> None:
    """Let the module of an encoder be refilled for the next one of its architecture."""
    _kept[:] = [(skeleton, (lambda: None) if owner() is encoder else owner) for skeleton, owner in _kept]


def unshared(family: Family, config: Mapping[str, Any], specs: Mapping[str, Spec]) -> Skeleton:
    """A module with any weights that nobody else will see: one that may be refilled, else a new one."""
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
