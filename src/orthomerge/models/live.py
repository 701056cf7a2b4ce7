"""Models in memory as checkpoints: a live `PreTrainedModel`, with its tokenizer or image processor if it has one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orthomerge.core.errors import CheckpointError, RecipeError
from orthomerge.files.checkpoint import DTYPES, Checkpoint, Entry, Spec, torch_dtype
from orthomerge.files.paths import MemoryFile


@dataclass(frozen=True, eq=False)
class Live:
    """`processor`: the tokenizer or image processor that belongs to the model, if it was given."""

    model: Any
    processor: Any = None


def as_live(value: object) -> Live | None:
    """A live model, alone or as (model, processor); None for anything else."""
    parts = value if isinstance(value, tuple) else (value,)
    if not 1 <= len(parts) <= 2 or not (hasattr(parts[0], "state_dict") and hasattr(parts[0], "config")):
        return None
    if hasattr(parts[0], "peft_config"):
        raise RecipeError("a live PEFT model must be merged first: give model.merge_and_unload(), or its saved folder")
    return Live(*parts)


def live_checkpoint(role: str, live: Live) -> Checkpoint:
    """The tensors of a live model by name, with its config; nothing is copied."""
    names = {torch_dtype(short): short for short in DTYPES}
    file = MemoryFile(Path(f"<{role} in memory>"))
    entries: dict[str, Entry] = {}
    aliases: dict[str, str] = {}
    owners: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in live.model.state_dict().items():
        if tensor.dtype not in names:
            raise CheckpointError(
                f"{name!r} of the live model of {role!r} is {tensor.dtype}; convert it to float first"
            )
        owner = owners.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
        if owner != name and tensor.numel():
            aliases[name] = owner
            continue
        spec = Spec(tuple(tensor.shape), names[tensor.dtype])
        entries[name] = Entry(file, file.add(tensor), spec)
    config = json.loads(live.model.config.to_json_string())  # as in the config.json of a saved model
    return Checkpoint(file.path, entries, config=config, aliases=aliases, in_memory=True)
