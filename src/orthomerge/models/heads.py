"""Classifiers on top of features: the one part of an expert that is never merged.

A head also says how it reads the encoder (pooling, maximum length) and what its outputs mean (its kind, an entry of
`KINDS`), because experts of one base differ in these.

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
from typing import TYPE_CHECKING, Any, Literal, Protocol

from orthomerge.core.errors import CheckpointError, IncompatibleError, NumericalError, RecipeError, nearest, some

if TYPE_CHECKING:
    import torch

    Rebuild = Callable[["Head", Mapping[str, torch.Tensor]], "Extra"]


Activation = Literal["tanh", "relu", "gelu"]
SINGLE_LABEL = "single-label"
_ROWS = 8192  # of features, that become logits at a time


class Classifier(Protocol):
    """Anything that turns features [B, d] into logits [B, C]."""

    @property
    def labels(self) -> tuple[str, ...]: ...

    def __call__(self, features: torch.Tensor) -> torch.Tensor: ...


class Extra(Classifier, Protocol):
    """A head behind a module, which a stock checkpoint cannot hold: its tensors are kept beside the model."""

    @property
    def head(self) -> Head: ...

    @property
    def kind(self) -> str: ...

    def extra_tensors(self) -> dict[str, torch.Tensor]: ...


@dataclass(frozen=True)
class Linear:
    """An affine map: weight [out, in] and, where there is one, bias [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        import torch

        # Features in float32 are not rounded to the precision of the head.
        dtype = torch.promote_types(values.dtype, self.weight.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return torch.nn.functional.linear(values.to(dtype), self.weight.to(dtype), bias)


@dataclass(frozen=True)
class Head:
    """A linear classifier, with a hidden layer where the family has one.

    `normalise` scales features to unit length first (CLIP; its logit scale is baked into the weight). `kind`: an entry
    of `KINDS`. `pooling`: how features are read off the encoder, None for the family's default. `max_length`:
    tokens per text, None for the default of the processor.
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
    def of(cls, tensors: Mapping[str, torch.Tensor], labels: tuple[str, ...], **more: Any) -> Head:
        """A head of tensors by part (`weight`, `bias`, `hidden.weight`, `hidden.bias`); `more`: other fields."""
        hidden = Linear(tensors["hidden.weight"], tensors.get("hidden.bias")) if "hidden.weight" in tensors else None
        output = Linear(tensors["weight"], tensors.get("bias"))
        return cls(output, labels, hidden, **more)

    def __post_init__(self) -> None:
        rows = self.output.weight.shape[0]
        if rows != len(self.labels):
            raise IncompatibleError(
                f"the head has {rows} rows but {len(self.labels)} labels ({some(self.labels)}); "
                "give one label per row, in the order of the rows"
            )
        if (self.hidden is None) != (self.activation is None):
            raise IncompatibleError("a head's hidden layer and its activation go together: give both or neither")

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        import torch

        if self.normalise:
            features = torch.nn.functional.normalize(features, dim=-1)
        if self.hidden is not None and self.activation is not None:
            features = getattr(torch.nn.functional, self.activation)(self.hidden(features))
        return self.output(features)

    @property
    def layers(self) -> int:
        """Number of linear layers."""
        return 1 if self.hidden is None else 2

    @property
    def width(self) -> int:
        """Number of features that the head reads."""
        first = self.hidden or self.output
        return int(first.weight.shape[1])

    def reordered(self, labels: tuple[str, ...]) -> Head:
        """The same head with its rows in the order of `labels`, matched by name."""
        if sorted(labels) != sorted(self.labels):
            raise IncompatibleError(f"label sets differ: {some(sorted(set(labels) ^ set(self.labels)))}")
        rows = [self.labels.index(label) for label in labels]
        output = Linear(self.output.weight[rows], None if self.output.bias is None else self.output.bias[rows])
        return replace(self, output=output, labels=labels)

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Head:
        """The same head with other numbers; `tensors` as from `tensors()`."""
        head = Head.of(tensors, self.labels, activation=self.activation)
        return replace(self, output=head.output, hidden=head.hidden)

    def to(self, *where: Any, **how: Any) -> Head:
        """The same head, its tensors detached and as `Tensor.to` makes them."""
        return self.with_tensors({name: tensor.detach().to(*where, **how) for name, tensor in self.tensors().items()})

    def reading_as(self, other: Head) -> Head:
        """The same layers with the kind, pooling and maximum length of another head."""
        return replace(self, kind=other.kind, pooling=other.pooling, max_length=other.max_length)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by its name in `head.safetensors`."""
        named = {"weight": self.output.weight, "bias": self.output.bias}
        if self.hidden is not None:
            named |= {"hidden.weight": self.hidden.weight, "hidden.bias": self.hidden.bias}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def misfit(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The first part of a head that does not fit the others, by shapes; None if all do.

    Weights are matrices, and the output layer reads as many numbers as the hidden layer has rows.
    """
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
    """The head of a classifier, which may be that head."""
    return classifier if isinstance(classifier, Head) else classifier.head  # type: ignore[attr-defined]


def logits_of(classifier: Classifier, values: torch.Tensor) -> torch.Tensor:
    """Logits [n, C] of all features, computed block by block."""
    import torch

    blocks = []
    with torch.no_grad():
        for block in torch.split(values, _ROWS):
            logits = classifier(block)
            if tuple(logits.shape) != (len(block), len(classifier.labels)):
                raise IncompatibleError(
                    f"a classifier with {len(classifier.labels)} labels must give logits "
                    f"({len(block)}, {len(classifier.labels)}) for {len(block)} inputs, got {tuple(logits.shape)}"
                )
            blocks.append(logits)
    return torch.cat(blocks)


@dataclass(frozen=True)
class Prediction:
    """What one head predicts for one input: the label, its score, and the scores of all labels."""

    label: str
    score: float
    scores: Mapping[str, float]

    def __repr__(self) -> str:
        return f"{self.label} {self.score:.2f}"


class SingleLabel:
    """Exactly one label is true: a softmax over the labels. `metric`: the name of the headline metric."""

    metric = "accuracy"

    def divergence(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """KL(softmax(teacher) || softmax(student)) [n], which fits minimise (Hinton et al. 2015, arXiv 1503.02531)."""
        logs = teacher.log_softmax(-1)
        return (logs.exp() * (logs - student.log_softmax(-1))).sum(-1)

    def targets(self, teacher: torch.Tensor) -> torch.Tensor:
        """What least squares fits [n, C]: logits minus their mean, which softmax does not see."""
        return teacher - teacher.mean(1, keepdim=True)

    def choices(self, logits: torch.Tensor) -> torch.Tensor:
        """The predicted row of labels [n]: that of the largest logit, the first of several equal ones."""
        if logits.ndim != 2 or not logits.shape[1]:
            raise IncompatibleError(f"logits must be [n, classes], got {tuple(logits.shape)}")
        wrong = logits.isnan().any(1)
        if wrong.any():
            raise NumericalError(f"{int(wrong.sum())} of {len(logits)} rows of logits hold NaN; they predict nothing")
        return logits.argmax(1)

    def right(self, chosen: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """Which predictions are right, [n]; their mean is the headline metric."""
        return chosen == truth

    def decode(self, logits: torch.Tensor, labels: Sequence[str]) -> list[Prediction]:
        """Predictions that a person reads."""
        places = self.choices(logits).tolist()
        rows = logits.double().softmax(1).tolist()
        return [
            Prediction(labels[place], row[place], dict(zip(labels, row, strict=True)))
            for place, row in zip(places, rows, strict=True)
        ]


KINDS: Mapping[str, SingleLabel] = {SINGLE_LABEL: SingleLabel()}


def head_kind(name: str) -> SingleLabel:
    if name not in KINDS:
        raise RecipeError(f"unknown kind of head {name!r}; {nearest(name, KINDS)}")
    return KINDS[name]


@dataclass(frozen=True, eq=False)
class SurgeryHead:
    """A head behind f - U relu(D f): `down` is D [r, d], `up` is U [d, r] (Yang et al. 2024, arXiv 2402.02705)."""

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
    """Build a classifier that is more than a head from its saved tensors; `where` is for messages."""
    if kind not in _rebuilders():
        raise CheckpointError(
            f"{where} belongs to the aligner {kind!r:.80}, which this version does not know "
            f"({nearest(kind, _rebuilders())}); update orthomerge, or align again"
        )
    odd = [name for name, tensor in tensors.items() if not tensor.is_floating_point()]
    if odd:
        raise CheckpointError(f"{where}: {some(odd)} must be in floating point; fetch the folder again, or align again")
    return _rebuilders()[kind](head, tensors)


@cache
def _rebuilders() -> Mapping[str, Rebuild]:
    """Functions by the aligner's name; the module of a plug-in aligner with `extra` has one called `rebuild`."""
    rows = [entry.load() for entry in entry_points(group="orthomerge.aligners")]
    plugins = {row.name: import_module(row.maker.partition(":")[0]).rebuild for row in rows if row.extra}
    return {**plugins, **{kind: partial(rebuild_surgery, kind=kind) for kind in ("surgery", "probsurgery")}}
