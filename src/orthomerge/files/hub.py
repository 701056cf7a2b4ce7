"""Download checkpoints by hub id, `org/name[@revision]`, through huggingface_hub and its cache.

The commit of a branch or tag is resolved once and returned, so that a run can record it.
"""

from __future__ import annotations

import re
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from orthomerge.core.errors import CheckpointError, some, summary

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


def is_hub_id(text: str) -> bool:
    """Return whether a text has the form `org/name[@revision]`; nothing is looked up."""
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
        what = "they must be safetensors or torch's pickles, at the top of the repository"
        raise CheckpointError(f"{name!r} has no supported weights: {what}; it has {some(files) or 'no files'}")
    folder = _snapshot(name, revision, patterns, local=False)
    if folder.name != info.sha:
        raise CheckpointError(f"{name}@{revision} changed while it was fetched; run the command again")
    return folder


def _snapshot(name: str, revision: str, weights: list[str], *, local: bool) -> Path:
    from huggingface_hub import snapshot_download

    wanted = [*_DOCUMENTS, *weights]
    folder = snapshot_download(
        name, revision=revision, allow_patterns=wanted, ignore_patterns=_NEVER, local_files_only=local
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
