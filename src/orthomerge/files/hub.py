"""Checkpoints named by hub id, `org/name[@revision]`, through huggingface_hub and its cache.

The commit of a branch or tag is resolved once and returned, so that a run can record what it read. Nothing here is
called for a path that exists.
"""

from __future__ import annotations

import re
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from orthomerge.core.errors import CheckpointError, some, summary

if TYPE_CHECKING:
    from collections.abc import Iterable


_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REFERENCE = re.compile(rf"{_WORD}/{_WORD}(?:@[A-Za-z0-9](?:[A-Za-z0-9._/-]{{0,198}}[A-Za-z0-9_])?)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# A name that ends like this is a mistyped path; asking the hub for it would only confuse.
_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".json", ".yaml", ".yml", ".git")
_PATIENCE = 30.0  # seconds for the hub to say what a repository holds

# Weights in the order of preference; the first group of which a repository holds a file is fetched.
_WEIGHTS = (
    ("model.safetensors", "model-*-of-*.safetensors", "adapter_model.safetensors"),
    ("*.safetensors",),
    ("pytorch_model.bin", "pytorch_model-*-of-*.bin", "adapter_model.bin"),
    ("*.bin", "*.pt", "*.pth", "*.ckpt"),
)
_DOCUMENTS = (
    *("config.json", "generation_config.json", "adapter_config.json", "*.index.json"),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model"),
    *("*processor_config.json", "chat_template.*"),
)
# Other folders, and the state of a trainer, are never wanted.
_NEVER = ("*/*", "training_args.bin", "optimizer.*", "scheduler.*", "rng_state*")


def is_hub_id(text: str) -> bool:
    """Return whether a text has the form `org/name[@revision]`, whatever exists."""
    name = text.partition("@")[0]
    sound = _REFERENCE.fullmatch(text) is not None and not name.lower().endswith(_FILES)
    return sound and "--" not in name and ".." not in text and "//" not in text


def fetch(reference: str) -> tuple[Path, str]:
    """Return the folder of a hub id's snapshot and its commit; what the cache holds is not fetched again."""
    if not is_hub_id(reference):
        raise CheckpointError(f"{reference!r} must be a hub id of the form org/name[@revision], or a path that exists")
    try:
        from huggingface_hub import constants
    except ImportError as error:
        raise CheckpointError(f"{reference!r} needs huggingface_hub: pip install 'orthomerge[hub]'") from error
    name, _, revision = reference.partition("@")
    get = _cached if constants.HF_HUB_OFFLINE else _online
    try:
        folder = get(name, revision or constants.DEFAULT_REVISION)
    except CheckpointError:
        raise
    except Exception as error:  # the hub's HTTP library has changed twice, and each brings errors of its own
        raise CheckpointError(_explain(error, reference, offline=bool(constants.HF_HUB_OFFLINE))) from error
    if _COMMIT.fullmatch(folder.name) is None:
        raise CheckpointError(
            f"no commit in the cache for {reference!r} but {folder}; remove that folder and fetch again"
        )
    return folder, folder.name


def _online(name: str, revision: str) -> Path:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        info = HfApi().model_info(name, revision=revision, timeout=_PATIENCE)
    except Exception:
        if _COMMIT.fullmatch(revision):  # it never changes: if all of it is here, the hub is not needed
            with suppress(LocalEntryNotFoundError, CheckpointError):
                return _cached(name, revision)
        raise
    files = [sibling.rfilename for sibling in info.siblings or ()]
    kind = _kind(files)
    if kind is None:
        what = "must be safetensors or torch's pickles, at the top of the repository"
        held = some(files) or "nothing"
        raise CheckpointError(f"{name!r} holds no weights that can be read: they {what}; it holds {held}")
    folder = _snapshot(name, revision, kind, local=False)
    if folder.name != info.sha:
        raise CheckpointError(f"{name}@{revision} changed while it was fetched; run the command again")
    return folder


def _cached(name: str, revision: str) -> Path:
    folder = _snapshot(name, revision, (), local=True)
    kind = _kind(path.name for path in folder.iterdir())
    if kind is None:
        raise CheckpointError(_forbidden(f"{name}@{revision} is in the cache without its weights ({folder})", name))
    return _snapshot(name, revision, kind, local=True)  # where the hub's listing is cached, nothing may be missing


def _snapshot(name: str, revision: str, kind: tuple[str, ...], *, local: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [*_DOCUMENTS, *kind]
    folder = snapshot_download(
        name, revision=revision, allow_patterns=patterns, ignore_patterns=list(_NEVER), local_files_only=local
    )
    return Path(folder)


def _kind(files: Iterable[str]) -> tuple[str, ...] | None:
    """Return the patterns of the weights to take from a repository with these files."""
    names = [file for file in files if not any(fnmatchcase(file, pattern) for pattern in _NEVER)]
    for patterns in _WEIGHTS:
        if any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
            return patterns
    return None


def _forbidden(what: str, name: str) -> str:
    return f"{what}, and HF_HUB_OFFLINE forbids fetching it: unset it, or run `hf download {name}` on a network"


def _explain(error: Exception, reference: str, *, offline: bool) -> str:
    """Describe what went wrong, and the way out."""
    from huggingface_hub import constants, errors

    name, _, revision = reference.partition("@")
    page = f"{constants.ENDPOINT}/{name}"
    if offline:
        return _forbidden(f"{reference!r} is not in the cache ({constants.HF_HUB_CACHE}), or not all of it", name)
    if isinstance(error, errors.GatedRepoError):
        return f"{name!r} is gated: accept its terms at {page}, then log in with `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name!r} has no revision {revision!r}: {page}/tree/main lists those that it has"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        what = f"{name!r} is no path that exists, and {page} does not exist or is private"
        return f"{what}: check the spelling, or log in with `hf auth login`"
    what = f"cannot fetch {reference!r} from {constants.ENDPOINT} ({summary(error)})"
    return f"{what}: check the network, or set HF_HUB_OFFLINE=1 to use what is in the cache"
