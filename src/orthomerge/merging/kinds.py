"""Types of merging methods and of what they read.

A *tensor method* is a pure function of one tensor across the experts. A *survey method* first streams everything once
(thresholds, norms, angles) and then becomes a tensor method. Both are small frozen dataclasses whose fields are their
hyper-parameters and therefore the schema of a recipe.

Letters: T experts; a block holds `base` [n] and `deltas` [T, n] in float32, where n elements start at `site.start` of
the flattened tensor. A method with `scope = "matrix"` gets every two-dimensional tensor whole: `base` [m, k], `deltas`
[T, m, k].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch


Scope = Literal["element", "matrix"]


@dataclass(frozen=True, slots=True)
class Site:
    """Where a block lies: tensor name, shape of the whole tensor, first element, and the experts in order."""

    key: str
    shape: tuple[int, ...]
    start: int
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """One run of elements of one tensor: base weights and each expert's delta, in float32."""

    site: Site
    base: torch.Tensor
    deltas: torch.Tensor


class Vectors(Protocol):
    """All task vectors of a merge, streamed."""

    @property
    def tasks(self) -> tuple[str, ...]: ...

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every merged tensor, in streaming order."""

    def blocks(self, *, keys: tuple[str, ...] | None = None, scope: Scope = "element") -> Iterator[Block]:
        """Every block of every tensor (or of those named) in order."""

    def factors(self, key: str) -> tuple[tuple[torch.Tensor, torch.Tensor], ...] | None:
        """Each expert's delta of one matrix as two thin factors [m, r] and [r, k]; None unless all are known."""


class TensorMethod(Protocol):
    """Merges one block; must not change its inputs."""

    @property
    def scope(self) -> Scope: ...

    @property
    def merge(self) -> Callable[..., torch.Tensor]:
        """`merge(base, deltas, *, site)`: the delta to add to `base`; same shape as `base`, float32."""


@dataclass(frozen=True)
class Surveyed:
    """A tensor method that knows the results of a survey."""

    scope: Scope
    merge: Callable[..., torch.Tensor]


class SurveyMethod(Protocol):
    """Looks at all vectors once, then merges block by block."""

    def survey(self, vectors: Vectors) -> TensorMethod: ...
