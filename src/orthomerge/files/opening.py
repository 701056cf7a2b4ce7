"""Open a checkpoint: a transformers folder, a single file, an adapter or a hub id.

A path that exists never touches the network. Folders are read by transformers' names, safetensors before pickles.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from orthomerge.core.errors import CheckpointError, some, summary
from orthomerge.files.checkpoint import Checkpoint, Entry
from orthomerge.files.documents import is_plain_name, read_json
from orthomerge.files.folders import contained
from orthomerge.files.lora import Adapter, read_adapter
from orthomerge.files.weights import ENDINGS, read_weights

_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REFERENCE = re.compile(rf"{_WORD}/{_WORD}(?:@[A-Za-z0-9](?:[A-Za-z0-9._/-]{{0,198}}[A-Za-z0-9_])?)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# A name with one of these endings is a mistyped path, not a hub id.
_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".json", ".yaml", ".yml", ".git")
_TIMEOUT = 30.0  # seconds, for the list of files of a repository

# Weights in the order of preference: the first group of patterns that match any file is fetched.
_WEIGHTS = (
    ["model.safetensors", "model-*-of-*.safetensors", "adapter_model.safetensors"],
    ["*.safetensors"],
    ["pytorch_model.bin", "pytorch_model-*-of-*.bin", "adapter_model.bin"],
    ["*.bin", "*.pt", "*.pth", "*.ckpt"],
)
_DOCUMENTS = (
    *("config.json", "generation_config.json", "adapter_config.json", "*.index.json"),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model"),
    *("*processor_config.json", "chat_template.*"),
)
# Never fetched: files in sub-folders, and the state of a trainer.
_NEVER = ["*/*", "training_args.bin", "optimizer.*", "scheduler.*", "rng_state*"]

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


def is_hub_id(text: str) -> bool:
    name = text.partition("@")[0]
    valid = _REFERENCE.fullmatch(text) is not None and not name.lower().endswith(_FILES)
    return valid and "--" not in name and ".." not in text and "//" not in text


def fetch(reference: str) -> tuple[Path, str]:
    """Download a hub id, except files in the cache, and return the folder of its snapshot and the commit."""
    from huggingface_hub import constants

    name, _, revision = reference.partition("@")
    revision = revision or constants.DEFAULT_REVISION
    try:
        # In the cache, missing weights are reported when the folder is opened.
        offline = constants.HF_HUB_OFFLINE
        folder = _snapshot(name, revision, [], local=True) if offline else _online(name, revision)
    except CheckpointError:
        raise
    except Exception as error:  # the hub's HTTP library has changed twice, and each has errors of its own
        raise CheckpointError(_explain(error, reference, offline=offline)) from error
    return folder, folder.name


def _online(name: str, revision: str) -> Path:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        info = HfApi().model_info(name, revision=revision, timeout=_TIMEOUT)
    except Exception:
        if _COMMIT.fullmatch(revision):  # it never changes: if the cache has all of it, the hub is not needed
            with suppress(LocalEntryNotFoundError):
                return _snapshot(name, revision, [], local=True)
        raise
    files = [sibling.rfilename for sibling in info.siblings or ()]
    patterns = _weight_patterns(files)
    if not patterns:
        raise CheckpointError(
            f"{name!r} has no supported weights: they must be safetensors or torch's pickles, at the top of the "
            f"repository; it has {some(files) or 'no files'}"
        )
    folder = _snapshot(name, revision, patterns, local=False)
    if folder.name != info.sha:
        raise CheckpointError(f"{name}@{revision} changed while it was fetched; run the command again")
    return folder


def _snapshot(name: str, revision: str, weights: list[str], *, local: bool) -> Path:
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        name, revision=revision, allow_patterns=[*_DOCUMENTS, *weights], ignore_patterns=_NEVER, local_files_only=local
    )
    return Path(folder)


def _weight_patterns(files: list[str]) -> list[str]:
    names = [file for file in files if not any(fnmatchcase(file, pattern) for pattern in _NEVER)]
    for patterns in _WEIGHTS:
        if any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
            return patterns
    return []


def _explain(error: Exception, reference: str, *, offline: bool) -> str:
    from huggingface_hub import constants, errors

    name, _, revision = reference.partition("@")
    page = f"{constants.ENDPOINT}/{name}"
    if offline:
        what = f"{reference!r} is not in the cache ({constants.HF_HUB_CACHE}), or not all of it"
        return f"{what}, and HF_HUB_OFFLINE forbids fetching it: unset it, or run `hf download {name}` on a network"
    if isinstance(error, errors.GatedRepoError):
        return f"{name!r} is gated: accept its terms at {page}, then log in with `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name!r} has no revision {revision!r}: {page}/tree/main lists its revisions"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        what = f"{name!r} is not a path that exists, and {page} does not exist or is private"
        return f"{what}: check the spelling, or log in with `hf auth login`"
    what = f"cannot fetch {reference!r} from {constants.ENDPOINT} ({summary(error)})"
    return f"{what}: check the network, or set HF_HUB_OFFLINE=1 to use what is in the cache"
