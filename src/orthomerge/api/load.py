"""Load a saved model."""

from __future__ import annotations

from pathlib import Path

from orthomerge.core.errors import RecipeError
from orthomerge.models.model import Model
from orthomerge.models.saved import read_model


def load(path: str | Path, *, verify: bool = True) -> Model:
    """Load a folder that `merge` wrote. Every byte that is used is compared with its recorded hash."""
    return read_model(Path(path).expanduser(), verify=verify)


def resolve(model: Model | str | Path) -> tuple[Model, Path | None]:
    """A model, or the model in a folder and that folder."""
    if isinstance(model, Model):
        return model, None
    if not isinstance(model, str | Path):
        raise RecipeError(f"a model must be a Model or the path of a saved one, got {type(model).__name__}")
    return load(model), Path(model).expanduser()
