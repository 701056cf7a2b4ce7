"""Open a checkpoint: a transformers folder, a single file, an adapter or a hub id.

A path that exists never touches the network. Folders are read by the names that transformers gives; when safetensors
and pickles lie side by side, safetensors win.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from orthomerge.core.errors import CheckpointError, some
from orthomerge.files.checkpoint import Checkpoint, Entry
from orthomerge.files.documents import is_plain_name, read_json
from orthomerge.files.folders import contained
from orthomerge.files.lora import Adapter, read_adapter
from orthomerge.files.weights import ENDINGS, read_weights

_WHOLE = ("model.safetensors", "pytorch_model.bin")  # in the order of preference
_SAVES = "index and shards are from different saves: fetch all of them again"


def locate(reference: str | Path) -> tuple[Path, str | None]:
    """Return a local path, and the commit if it was downloaded; a `Path` is never looked up on the hub."""
    why = "does not exist"
    try:
        path = Path(reference).expanduser()
        if path.exists():
            return path, None
    except (OSError, RuntimeError) as error:  # too long a name, a folder without permission, a user without home
        why = f"cannot be opened ({getattr(error, 'strerror', None) or error})"
    if isinstance(reference, Path):
        raise CheckpointError(f"{reference} {why}")
    from orthomerge.files.hub import fetch, is_hub_id

    if is_hub_id(reference):
        return fetch(reference)
    raise CheckpointError(f"{reference!r} {why}, and is not a hub id of the form org/name[@revision]")


def open_checkpoint(reference: str | Path) -> Checkpoint:
    """Open a full model; an adapter is refused."""
    opened = open_expert(reference)
    if isinstance(opened, Adapter):
        raise CheckpointError(
            f"{reference} is a LoRA adapter, not a full model; adapters can be experts, the base must be the full model"
        )
    return opened


def open_expert(reference: str | Path) -> Checkpoint | Adapter:
    """Open a full model or an adapter."""
    path, revision = locate(reference)
    opened: Checkpoint | Adapter
    try:
        if not path.is_dir():
            opened = read_weights(path)
        elif (path / "adapter_config.json").exists():
            opened = read_adapter(path)
        else:
            opened = _open_folder(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return replace(opened, revision=revision, reference=str(reference))


def _open_folder(folder: Path) -> Checkpoint:
    config = read_json(contained(folder / "config.json", folder)) if (folder / "config.json").exists() else None
    if quantised := (config or {}).get("quantization_config"):
        kind = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise CheckpointError(f"{folder} is quantised ({kind}); merge the original float weights, quantise the result")
    return replace(_open_weights(folder), path=folder, config=config)


def _open_weights(folder: Path) -> Checkpoint:
    for name in _WHOLE:
        whole, index = folder / name, folder / f"{name}.index.json"
        # A broken link is an error when it is opened, not a reason to try the other name.
        present = [path for path in (whole, index) if os.path.lexists(path)]
        if len(present) == 2:
            raise CheckpointError(
                f"{folder} holds both {name} and {index.name}: one of them is left over from an earlier save; remove it"
            )
        if present:
            path = contained(present[0], folder)
            return read_weights(path) if path == whole else _open_shards(path)
    others = [path for path in sorted(folder.iterdir()) if path.suffix in ENDINGS]
    if len(others) == 1:
        return read_weights(contained(others[0], folder))
    what = f"several weight files ({some(path.name for path in others)})" if others else "no weights"
    raise CheckpointError(
        f"{folder} holds {what}: expected {' or '.join(_WHOLE)}, or one of them in shards with its index; "
        "name the file itself if it has another name"
    )


def _open_shards(index: Path) -> Checkpoint:
    document = read_json(index)
    names = document.get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(shard, str) for shard in names.values()):
        raise CheckpointError(f"{index} must have a 'weight_map' from tensor names to file names; fetch it again")
    suffix = ".safetensors" if index.name.startswith("model.safetensors") else ".bin"
    entries: dict[str, Entry] = {}
    aliases: dict[str, str] = {}
    for shard in sorted(set(names.values())):
        opened = read_weights(_shard_path(index, shard, suffix))
        stored = {*opened.entries, *opened.aliases}
        listed = {name for name, file in names.items() if file == shard}
        if missing := sorted(listed - stored):
            raise CheckpointError(f"{index} lists {some(missing)} in {shard}, which does not have it; {_SAVES}")
        if unlisted := sorted(stored - listed):
            raise CheckpointError(f"{opened.path} has {some(unlisted)}, which {index.name} does not list; {_SAVES}")
        entries |= opened.entries
        aliases |= opened.aliases
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    size = sum(entry.spec.nbytes for entry in entries.values())
    # In pickles, tied weights are counted once per name, so only safetensors must agree to the byte.
    if suffix == ".safetensors" and isinstance(total, int) and total != size:
        raise CheckpointError(f"the shards of {index} must have {total} bytes (its total_size), got {size}; {_SAVES}")
    return Checkpoint(index, entries, aliases=aliases)


def _shard_path(index: Path, shard: str, suffix: str) -> Path:
    if not is_plain_name(shard) or "/" in shard:
        raise CheckpointError(f"{index} points outside its own folder, to {shard!r}; do not trust this file")
    if not shard.endswith(suffix):
        raise CheckpointError(f"{index} points to {shard!r}, which is not a {suffix} file; do not trust this file")
    path = index.parent / shard
    if not path.exists():
        raise CheckpointError(f"{index} names the shard {shard!r}, which is missing; fetch it again")
    return contained(path, index.parent)
