"""Interfaces of merging methods and of their inputs.

A *tensor method* is a pure function of one tensor across the experts. A *survey method* first streams everything once
(thresholds, norms, angles) and then becomes a tensor method. Both are frozen dataclasses, whose fields are options.

Letters: T experts; a block holds `base` [n] and `deltas` [T, n]. A method with `scope = "matrix"` gets every
two-dimensional tensor whole: `base` [m, k], `deltas` [T, m, k].
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
    """Position of a block: tensor name, shape of the whole tensor, first element; and the experts in order."""

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


STRIDE = 1 << 21  # elements from one sampled run to the next


class Vectors(Protocol):
    """All task vectors of a merge, streamed."""

    @property
    def tasks(self) -> tuple[str, ...]: ...

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every merged tensor by name, in streaming order."""

    def blocks(self, *, keys: tuple[str, ...] | None = None, scope: Scope = "element") -> Iterator[Block]:
        """Stream the blocks of all tensors, or of `keys`, in order."""

    def sample(self) -> Iterator[Block]:
        """A few elements of every tensor, at least one run per `STRIDE` elements; or nothing, if they are costly."""

    def factors(self, key: str) -> tuple[tuple[torch.Tensor, torch.Tensor], ...] | None:
        """Thin factors [m, r] and [r, k] of each expert's delta of one matrix; None unless every expert has them."""


class TensorMethod(Protocol):
    """A method that merges each block by itself; it must not modify its inputs."""

    @property
    def scope(self) -> Scope: ...

    @property
    def merge(self) -> Callable[..., torch.Tensor]:
        """Function `merge(base, deltas, *, site)`: the delta to add to `base`, of its shape, in float32."""


@dataclass(frozen=True)
class Surveyed:
    """The tensor method that a survey returns."""

    merge: Callable[..., torch.Tensor]
    scope: Scope = "element"


class SurveyMethod(Protocol):
    """A method that reads all vectors once before it merges block by block."""

    def survey(self, vectors: Vectors) -> TensorMethod: ...
