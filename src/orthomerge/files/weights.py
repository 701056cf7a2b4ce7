"""Open one file of weights of any format."""

from __future__ import annotations

from pathlib import Path

from orthomerge.core.errors import CheckpointError
from orthomerge.files.checkpoint import Checkpoint
from orthomerge.files.safetensors import read_safetensors

ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


def read_weights(path: Path) -> Checkpoint:
    """Open a safetensors file or a file of `torch.save`, without reading its tensors."""
    if path.suffix not in ENDINGS:
        raise CheckpointError(f"{path} is not a checkpoint: give a folder, or a file that ends in {', '.join(ENDINGS)}")
    if path.suffix == ".safetensors":
        return Checkpoint(path, read_safetensors(path))
    from orthomerge.files.pickles import read_pickle

    return read_pickle(path)
