"""What an encoder makes of inputs, with the task and split they came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orthomerge.core.errors import IncompatibleError

if TYPE_CHECKING:
    import torch

    from orthomerge.data.task import Examples, Split


@dataclass(frozen=True)
class Features:
    """Features [n, d] in float32 on the CPU, in the order of the inputs; labels [n] (int64) where they are known."""

    values: torch.Tensor
    task: str
    split: Split
    labels: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.values.ndim != 2:
            raise IncompatibleError(f"features must be [n, d], got {tuple(self.values.shape)}")
        if self.labels is not None and len(self.labels) != len(self.values):
            raise IncompatibleError(f"{len(self.values)} features but {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.values)

    @classmethod
    def of(cls, values: torch.Tensor, examples: Examples, task: str) -> Features:
        """Features of some examples, with their labels."""
        import torch

        labels = None if examples.labels is None else torch.tensor(examples.labels, dtype=torch.int64)
        return cls(values, task, examples.split, labels)

    def take(self, places: torch.Tensor) -> Features:
        """Some rows, in the order given."""
        labels = None if self.labels is None else self.labels[places]
        return Features(self.values[places], self.task, self.split, labels)

    def unlabelled(self) -> Features:
        """The same without labels."""
        return Features(self.values, self.task, self.split)


@dataclass(frozen=True)
class FeaturePair:
    """The same inputs seen by the merged encoder and by the expert."""

    merged: Features
    expert: Features

    def __post_init__(self) -> None:
        one, other = self.merged, self.expert
        if (len(one), one.task, one.split) != (len(other), other.task, other.split):
            raise IncompatibleError(
                f"a pair must hold the same inputs: {len(one)} of {one.task}/{one.split}, "
                f"{len(other)} of {other.task}/{other.split}"
            )
