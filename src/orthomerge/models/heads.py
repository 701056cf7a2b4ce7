"""Classifiers on top of features: the one part of an expert that is never merged.

A head includes what differs among experts of one base: pooling, maximum length, and its kind, an entry of `KINDS`.

`Head` is the only classifier that a stock checkpoint can store, so an aligner that returns a `Head` adds no parameter.
Rows are samples: features F [B, d], weight W [C, d], logits F W^T + b.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from orthomerge.core.errors import CheckpointError, IncompatibleError, NumericalError, nearest, some
from orthomerge.core.schema import find_row

if TYPE_CHECKING:
    import torch

    Rebuild = Callable[["Head", Mapping[str, torch.Tensor]], "Extra"]


Activation = Literal["tanh", "relu", "gelu"]
SINGLE_LABEL = "single-label"
_BLOCK = 8192  # rows of features per block of logits


class Classifier(Protocol):
    """Callable from features [B, d] to logits [B, C]."""

    @property
    def labels(self) -> tuple[str, ...]: ...

    def __call__(self, features: torch.Tensor) -> torch.Tensor: ...


class Extra(Classifier, Protocol):
    """A module before a head. Stock checkpoints cannot store it, so its tensors are saved in a file of their own."""

    @property
    def head(self) -> Head: ...

    @property
    def kind(self) -> str: ...

    def extra_tensors(self) -> dict[str, torch.Tensor]: ...


@dataclass(frozen=True)
class Linear:
    """An affine map: weight [out, in] and an optional bias [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        import torch

        # Do not round float32 features to the dtype of the head.
        dtype = torch.promote_types(values.dtype, self.weight.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return torch.nn.functional.linear(values.to(dtype), self.weight.to(dtype), bias)


@dataclass(frozen=True)
class Head:
    """A linear classifier, with an optional hidden layer.

    `normalise` scales features to unit length first (CLIP; the weight includes its logit scale). `kind`: an entry of
    `KINDS`. `pooling`: None for the family's default. `max_length`: tokens per text, None for the processor's default.
    """

    output: Linear
    labels: tuple[str, ...]
    hidden: Linear | None = None
    activation: Activation | None = None
    normalise: bool = False
    kind: str = SINGLE_LABEL
    pooling: str | None = None
    max_length: int | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], labels: tuple[str, ...], **fields: Any) -> Head:
        """Make a head from tensors by part (`weight`, `bias`, `hidden.weight`, `hidden.bias`) and other fields."""
        hidden = Linear(tensors["hidden.weight"], tensors.get("hidden.bias")) if "hidden.weight" in tensors else None
        return cls(Linear(tensors["weight"], tensors.get("bias")), labels, hidden, **fields)

    def __post_init__(self) -> None:
        rows = self.output.weight.shape[0]
        if rows != len(self.labels):
            raise IncompatibleError(
                f"the head has {rows} rows but {len(self.labels)} labels ({some(self.labels)}); "
                "give one label per row, in the order of the rows"
            )
        if (self.hidden is None) != (self.activation is None):
            raise IncompatibleError("a head's hidden layer and its activation go together; give both or neither")

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        import torch

        if self.normalise:
            features = torch.nn.functional.normalize(features, dim=-1)
        if self.hidden is not None and self.activation is not None:
            features = getattr(torch.nn.functional, self.activation)(self.hidden(features))
        return self.output(features)

    @property
    def width(self) -> int:
        return int((self.hidden or self.output).weight.shape[1])

    def reordered(self, labels: tuple[str, ...]) -> Head:
        """Return the head with its rows in the order of `labels`, matched by name."""
        if sorted(labels) != sorted(self.labels):
            raise IncompatibleError(
                f"label sets differ: {some(sorted(set(labels) ^ set(self.labels)))}; give both the same names"
            )
        rows = [self.labels.index(label) for label in labels]
        output = Linear(self.output.weight[rows], None if self.output.bias is None else self.output.bias[rows])
        return replace(self, output=output, labels=labels)

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Head:
        """Return the head with other weights; `tensors` as from `tensors()`."""
        head = Head.of(tensors, self.labels, activation=self.activation)
        return replace(self, output=head.output, hidden=head.hidden)

    def to(self, *args: Any, **kwargs: Any) -> Head:
        """Return the head with its tensors detached and converted by `Tensor.to`."""
        return self.with_tensors({name: tensor.detach().to(*args, **kwargs) for name, tensor in self.tensors().items()})

    def reading_as(self, other: Head) -> Head:
        """Return the head with the kind, pooling and maximum length of another head."""
        return replace(self, kind=other.kind, pooling=other.pooling, max_length=other.max_length)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by part (`weight`, `bias`, `hidden.weight`, `hidden.bias`)."""
        tensors = {"weight": self.output.weight, "bias": self.output.bias}
        if self.hidden is not None:
            tensors |= {"hidden.weight": self.hidden.weight, "hidden.bias": self.hidden.bias}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def misfit(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Name the first part of a head whose shape does not fit the others; None if all fit."""
    hidden = shapes.get("hidden.weight")
    for part, shape in shapes.items():
        if part.endswith("bias"):
            fits = shape == shapes[part.replace("bias", "weight")][:1]
        else:
            fits = len(shape) == 2 and (part == "hidden.weight" or hidden is None or hidden[:1] == shape[1:])
        if not fits:
            return part
    return None


def head_of(classifier: Classifier) -> Head:
    return classifier if isinstance(classifier, Head) else classifier.head  # type: ignore[attr-defined]


def logits_of(classifier: Classifier, values: torch.Tensor) -> torch.Tensor:
    """Compute the logits [n, C] of all features in blocks."""
    import torch

    with torch.no_grad():
        logits = torch.cat([classifier(block) for block in torch.split(values, _BLOCK)])
    expected = (len(values), len(classifier.labels))
    if tuple(logits.shape) != expected:
        raise IncompatibleError(
            f"a classifier with {expected[1]} labels must give logits {expected} for {expected[0]} inputs, "
            f"got {tuple(logits.shape)}; correct the classifier"
        )
    return logits


@dataclass(frozen=True)
class Prediction:
    """Prediction of one head for one input: the label, its score, and the scores of all labels."""

    label: str
    score: float
    scores: Mapping[str, float]

    def __repr__(self) -> str:
        return f"{self.label} {self.score:.2f}"


class SingleLabel:
    """Heads with a softmax over labels of which exactly one is true. `metric`: name of the headline metric."""

    metric: ClassVar[Literal["accuracy"]] = "accuracy"

    def divergence(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """KL(softmax(teacher) || softmax(student)) [n], which fits minimise (Hinton et al. 2015, arXiv 1503.02531)."""
        logs = teacher.log_softmax(-1)
        return (logs.exp() * (logs - student.log_softmax(-1))).sum(-1)

    def targets(self, teacher: torch.Tensor) -> torch.Tensor:
        """Targets of least squares [n, C]: logits minus their mean, which does not change the softmax."""
        return teacher - teacher.mean(1, keepdim=True)

    def choices(self, logits: torch.Tensor) -> torch.Tensor:
        """Indices of the predicted labels [n]: those of the largest logits, the first of equal ones."""
        if logits.ndim != 2 or not logits.shape[1]:
            raise IncompatibleError(f"logits must be [n, classes], got {tuple(logits.shape)}; correct the classifier")
        count = int(logits.isnan().any(1).sum())
        if count:
            raise NumericalError(f"{count} of {len(logits)} rows of logits hold NaN; check the weights and the inputs")
        return logits.argmax(1)

    def right(self, chosen: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """Whether each prediction is right [n]; the mean is the headline metric."""
        return chosen == truth

    def decode(self, logits: torch.Tensor, labels: Sequence[str]) -> list[Prediction]:
        choices = self.choices(logits).tolist()
        return [
            Prediction(labels[choice], row[choice], dict(zip(labels, row, strict=True)))
            for choice, row in zip(choices, logits.double().softmax(1).tolist(), strict=True)
        ]


KINDS: Mapping[str, SingleLabel] = {SINGLE_LABEL: SingleLabel()}


def head_kind(name: str) -> SingleLabel:
    return find_row(KINDS, name, what="kind of head")


@dataclass(frozen=True, eq=False)
class SurgeryHead:
    """A head on top of f - U relu(D f): `down` is D [r, d], `up` is U [d, r] (Yang et al. 2024, arXiv 2402.02705)."""

    head: Head
    down: torch.Tensor
    up: torch.Tensor
    kind: str = "surgery"

    @property
    def labels(self) -> tuple[str, ...]:
        return self.head.labels

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(features - (features @ self.down.T).relu() @ self.up.T)

    def extra_tensors(self) -> dict[str, torch.Tensor]:
        return {"down": self.down, "up": self.up}


def rebuild_surgery(head: Head, tensors: Mapping[str, torch.Tensor], *, kind: str = "surgery") -> SurgeryHead:
    if set(tensors) != {"down", "up"}:
        raise CheckpointError(f"a {kind} module must hold 'down' and 'up', got {sorted(tensors)}; align again")
    down, up = tensors["down"], tensors["up"]
    if down.ndim != 2 or down.shape[1] != head.width or up.shape != down.shape[::-1]:
        raise CheckpointError(
            f"a {kind} module before a head of width {head.width} must have 'down' [r, {head.width}] and 'up' "
            f"[{head.width}, r], got {tuple(down.shape)} and {tuple(up.shape)}; align again"
        )
    return SurgeryHead(head, down, up, kind)


def rebuilt(kind: str, head: Head, tensors: Mapping[str, torch.Tensor], *, where: Path) -> Extra:
    """Rebuild a classifier with a module before its head from its saved tensors; `where` is for messages."""
    if kind not in _rebuilders():
        raise CheckpointError(
            f"{where} belongs to the aligner {kind!r:.80}, which this version does not have "
            f"({nearest(kind, _rebuilders())}); update orthomerge, or align again"
        )
    integers = [name for name, tensor in tensors.items() if not tensor.is_floating_point()]
    if integers:
        raise CheckpointError(
            f"{where}: {some(integers)} must be floating-point; fetch the folder again, or align again"
        )
    return _rebuilders()[kind](head, tensors)


@cache
def _rebuilders() -> Mapping[str, Rebuild]:
    """Rebuilding functions by aligner; the module of a plug-in aligner with `extra` must define `rebuild`."""
    rows = [entry.load() for entry in entry_points(group="orthomerge.aligners")]
    plugins = {row.name: import_module(row.maker.partition(":")[0]).rebuild for row in rows if row.extra}
    return {**plugins, **{kind: partial(rebuild_surgery, kind=kind) for kind in ("surgery", "probsurgery")}}
