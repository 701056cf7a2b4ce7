"""The weights of a model with what is needed to run them; models that differ in their heads share one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from orthomerge.core.errors import RecipeError
from orthomerge.models.modules import Skeleton, loaded
from orthomerge.models.tensors import FileTensors, content_digest

if TYPE_CHECKING:
    import torch

    from orthomerge.models.family import Family
    from orthomerge.models.tensors import Tensors


Mode = Literal["ordinary", "linearised"]


@dataclass(frozen=True, eq=False)
class Encoder:
    """`config`: of the family's encoder class. `start`: of a linearised encoder, the weights it is linear around."""

    family: Family
    config: Mapping[str, Any]
    tensors: Tensors
    start: Tensors | None = None

    @property
    def mode(self) -> Mode:
        return "ordinary" if self.start is None else "linearised"

    @property
    def digest(self) -> str:
        """Identity of content: tensors and config; not of paths, options or heads."""
        if not self.knows_digest:
            if isinstance(self.tensors, FileTensors) or not self.family.encoder_class:
                self.remember(content_digest(self.tensors, self.family.prefix))
            else:
                loaded(self)  # computes the weights once for both
        parts = [self.family.name, self.content, self.config]
        if self.start is not None:
            parts.append(content_digest(self.start, self.family.prefix))
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def knows_digest(self) -> bool:
        return "_content" in self.__dict__

    @property
    def content(self) -> str:
        """The hash of the one file that the tensors would be written to, once it is known."""
        content: str = self.__dict__["_content"]
        return content

    def remember(self, content: str) -> None:
        """Keep the hash of the tensors, which somebody computed while they passed by."""
        self.__dict__["_content"] = content

    def runner(self, pooling: str) -> tuple[Any, Family]:
        """What gives features: a module that others may use too, and the family that says how it is read."""
        if self.start is None:
            return loaded(self).module, self.family
        from orthomerge.models.linearised import tangent

        return tangent(self, pooling)

    def module(self, *, eager: bool = False) -> torch.nn.Module:
        """A new module with these weights, in eval mode, on the CPU."""
        if self.start is not None:
            raise RecipeError(
                "a linearised model is a tangent, which stock classes cannot run; use predict or evaluate"
            )
        skeleton = Skeleton.build(self.family, self.config, dict(self.tensors.specs), eager=eager)
        skeleton.fill(self.tensors)
        return skeleton.module
