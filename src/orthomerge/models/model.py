"""The type of all models: a base, an expert, a merge, a fit.

A model is an immutable value whose weights are computed when they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from orthomerge.core.device import device_of
from orthomerge.models.heads import Prediction
from orthomerge.models.model_data import ModelData
from orthomerge.models.writing import write_model

if TYPE_CHECKING:
    import torch

    from orthomerge.models.networks import MultiHead

    _Tasks = Sequence[str] | None
    _Row = dict[str, Prediction]


class Model(ModelData):
    """One encoder with a head per task: an immutable model that can predict and be saved to a folder."""

    def module(self, device: str = "auto", dtype: torch.dtype | None = None) -> MultiHead:
        """Build a new module that returns the logits of every task; it shares no weights with other modules."""
        from orthomerge.models.networks import MultiHead

        return MultiHead(self.encoder.module(), self.family, self.heads).to(device_of(device), dtype)

    @overload
    def predict(self, inputs: str | Path, *, tasks: _Tasks = ..., device: str = ..., batch_size: int = ...) -> _Row: ...

    @overload
    def predict(  # type: ignore[overload-overlap]  # a list is an object too, but it holds several inputs
        self, inputs: Sequence[Any], *, tasks: _Tasks = ..., device: str = ..., batch_size: int = ...
    ) -> list[_Row]: ...

    @overload
    def predict(self, inputs: object, *, tasks: _Tasks = ..., device: str = ..., batch_size: int = ...) -> _Row: ...

    def predict(
        self, inputs: Any, *, tasks: Sequence[str] | None = None, device: str = "auto", batch_size: int = 32
    ) -> dict[str, Prediction] | list[dict[str, Prediction]]:
        """Predict a label per task for raw inputs: texts, or images as paths, PIL images or arrays.

        One input gives a dict by task, a list of inputs a list of dicts in the same order.
        """
        from orthomerge.models.encoding import predict

        return predict(self, inputs, tasks=tasks, device=device, batch_size=batch_size)

    def save(self, out: str | Path, *, force: bool = False, max_shard_size: str | int = "5GB") -> Model:
        """Write the model to a folder atomically and return the model."""
        write_model(self, Path(out), force=force, max_shard_size=max_shard_size)
        return self
