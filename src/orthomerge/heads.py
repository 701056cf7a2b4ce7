"""Classifiers on top of features: the one part of an expert that is never merged.

`Head` is the only classifier that a stock checkpoint can store, so an aligner that returns a `Head` adds no parameter
by construction. Rows are samples: features F [B, d], weight W [C, d], logits F W^T + b.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from orthomerge.errors import IncompatibleError, some

if TYPE_CHECKING:
    import torch

__all__ = ["Activation", "Classifier", "Head", "Linear"]

Activation = Literal["tanh", "relu", "gelu"]


class Classifier(Protocol):
    """Anything that turns features [B, d] into logits [B, C]."""

    @property
    def labels(self) -> tuple[str, ...]: ...

    def __call__(self, features: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Linear:
    """An affine map: weight [out, in] and, where there is one, bias [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        import torch

        # A head in half precision reads features in float32 as they are.
        dtype = torch.promote_types(values.dtype, self.weight.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return torch.nn.functional.linear(values.to(dtype), self.weight.to(dtype), bias)


@dataclass(frozen=True)
class Head:
    """A linear classifier, with a hidden layer where the family has one.

    `normalise` scales features to unit length first (CLIP; its logit scale is baked into the weight).
    """

    output: Linear
    labels: tuple[str, ...]
    hidden: Linear | None = None
    activation: Activation | None = None
    normalise: bool = False

    def __post_init__(self) -> None:
        rows = self.output.weight.shape[0]
        if rows != len(self.labels):
            raise IncompatibleError(
                f"the head has {rows} rows but {len(self.labels)} labels ({some(self.labels)}); "
                "give one label a row, in the order of the rows"
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
    def width(self) -> int:
        """Number of features that the head reads."""
        first = self.hidden or self.output
        return int(first.weight.shape[1])

    def reordered(self, labels: tuple[str, ...]) -> Head:
        """The same head with its rows in the order of `labels`, matched by name."""
        if sorted(labels) != sorted(self.labels):
            raise IncompatibleError(f"label sets differ: {some(sorted(set(labels) ^ set(self.labels)))}")
        if len(set(labels)) < len(labels):
            raise IncompatibleError(f"rows are matched by name, but two labels are the same ({some(sorted(labels))})")
        rows = [self.labels.index(label) for label in labels]
        bias = self.output.bias
        output = Linear(self.output.weight[rows], None if bias is None else bias[rows])
        return Head(output, labels, self.hidden, self.activation, self.normalise)

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Head:
        """The same head with other numbers; `tensors` has the names of `tensors()`."""
        hidden = Linear(tensors["hidden.weight"], tensors.get("hidden.bias")) if self.hidden is not None else None
        output = Linear(tensors["weight"], tensors.get("bias"))
        return Head(output, self.labels, hidden, self.activation, self.normalise)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by its name in `head.safetensors`."""
        named = {"weight": self.output.weight, "bias": self.output.bias}
        if self.hidden is not None:
            named |= {"hidden.weight": self.hidden.weight, "hidden.bias": self.hidden.bias}
        return {name: tensor for name, tensor in named.items() if tensor is not None}
