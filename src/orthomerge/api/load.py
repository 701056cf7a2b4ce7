from pathlib import Path

from orthomerge.models.model import Model
from orthomerge.models.saved import read_model


def load(path: str | Path, *, verify: bool = True) -> Model:
    """Load a folder that `merge` wrote. `verify`: compare every file with its recorded hash when it is read."""
    return read_model(Path(path).expanduser(), verify=verify)
