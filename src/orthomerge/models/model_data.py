"""What a model consists of: an encoder, a head per task, how inputs are processed, and how it was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from orthomerge.core.errors import IncompatibleError, RecipeError, nearest

if TYPE_CHECKING:
    from orthomerge.data.task import Access
    from orthomerge.models.family import Family
    from orthomerge.models.heads import Extra, Head
    from orthomerge.models.modules import Encoder
    from orthomerge.models.processors import ProcessorSource
    from orthomerge.models.sources import Opened
    from orthomerge.models.tensors import Tensors


@dataclass(frozen=True, eq=False)
class Origin:
    """How a model was made, as plain data.

    `facts`: method, seed, notes, and what a fit, an alignment or an evaluation adds. `experts`: what it was made from,
    if that is still open. `record`: what a saved model says of that (hashes, how each expert was opened), and `places`:
    the paths of experts and, under "", of the base, from a local file that is never pushed. `inputs`: short hashes of
    inputs seen, by task.
    """

    facts: Mapping[str, Any]
    experts: Opened | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def access(self) -> Access:
        """Which inputs the making saw: none, unless it was fitted or its heads were aligned."""
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
        """Identity of the encoder's content."""
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
        """The same encoder with other heads."""
        return replace(self, heads=dict(heads), origin=origin or self.origin)

    def linearised(self, base: ModelData) -> Self:
        """A merge of `linearised` or `tau_jp` experts as the linear model that it is, around the experts' base."""
        if odd := sorted(base.weights.specs.keys() ^ self.weights.specs.keys()):
            raise IncompatibleError(f"only one of base and model has the tensor {odd[0]!r}; give the experts' own base")
        return replace(self, encoder=replace(self.encoder, start=base.weights))
