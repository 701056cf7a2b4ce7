"""Upload an output folder to the hub, through huggingface_hub.

The manifest and the files that it lists are uploaded, each hashed again right before it is sent. Files of an earlier
push that this output lacks (shards, folders of tasks) are removed in the same commit; all others stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from orthomerge.core.errors import OutputError, RecipeError, some, summary
from orthomerge.files.folders import MANIFEST
from orthomerge.files.opening import is_hub_id
from orthomerge.files.raw_file import RawFile
from orthomerge.models.manifest import ENCODER, HEAD, read_manifest
from orthomerge.models.saved import verify_folder

_SHARDS = re.compile(rf"{ENCODER}(-\d+-of-\d+)?\.safetensors")
_TIMEOUT = 60.0  # seconds without an answer, or without a byte sent


def plan_upload(out: Path, repo: str, *, revision: str | None = None) -> dict[str, dict[str, Any]]:
    """Verify an output, check the names, and return size and hash of each file; nothing is sent."""
    if not is_hub_id(repo) or "@" in repo:
        raise RecipeError(f"{repo!r} must name a repository of the hub as org/name; for a branch, give --revision")
    if revision is not None and not is_hub_id(f"{repo}@{revision}"):
        raise RecipeError(f"--revision must be the name of a branch, got {revision!r:.80}")
    if problems := verify_folder(out):
        raise OutputError(
            f"{out} differs from its manifest, so it is not uploaded: {some(problems)}; merge again, or fetch it again"
        )
    manifest = RawFile(out / MANIFEST)
    files = {**read_manifest(out)["files"], MANIFEST: {"size": manifest.size, "hash": manifest.digest()}}
    return dict(sorted(files.items()))


def send(
    out: Path,
    repo: str,
    files: Mapping[str, Mapping[str, Any]],
    *,
    private: bool = False,
    revision: str | None = None,
) -> str:
    """Upload planned files and return the address of the commit. The token is that of `hf auth login`, or HF_TOKEN."""
    from huggingface_hub import CommitOperationDelete, HfApi, constants

    if constants.HF_HUB_OFFLINE:
        raise OutputError("HF_HUB_OFFLINE forbids uploading; unset it, and push again")
    api = HfApi(library_name="orthomerge")
    try:
        with _time_limit():
            api.create_repo(repo, private=private, repo_type="model", exist_ok=True)
            if revision is not None:
                api.create_branch(repo, branch=revision, exist_ok=True)
            remote = api.list_repo_files(repo, revision=revision)
            commit = api.create_commit(
                repo,
                [*_additions(out, files), *(CommitOperationDelete(name) for name in _left_over(remote, files))],
                revision=revision,
                commit_message="Upload a merge made by orthomerge",
            )
    except OutputError:
        raise
    except Exception as error:  # of any class: the hub's HTTP library has changed twice
        raise OutputError(_explain(error, repo)) from error
    return str(commit.commit_url)


def _additions(out: Path, files: Mapping[str, Mapping[str, Any]]) -> Iterator[Any]:
    from huggingface_hub import CommitOperationAdd

    for name, expected in files.items():
        file = RawFile((out / name).resolve())
        if file.digest() != expected["hash"]:
            raise OutputError(f"{out / name} has changed since it was verified; push again")
        yield CommitOperationAdd(name, file.path)
        file.check_unchanged()


def _left_over(remote: Iterable[str], files: Iterable[str]) -> list[str]:
    names = list(remote)
    tasks = {PurePosixPath(name).parent for name in names if PurePosixPath(name).name == HEAD}
    pushed = {name for name in names if _SHARDS.fullmatch(name) or PurePosixPath(name).parent in tasks}
    return sorted(pushed - set(files))


@contextmanager
def _time_limit() -> Iterator[None]:
    """Set a time limit for requests, without which the library may wait forever for the hub."""
    from huggingface_hub import utils

    session: Any = utils.get_session()  # type: ignore[attr-defined] # documented, but not in `__all__`
    before, session.timeout = session.timeout, _TIMEOUT
    try:
        yield
    finally:
        session.timeout = before


def _explain(error: Exception, repo: str) -> str:
    from huggingface_hub import constants

    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401 or type(error).__name__ == "LocalTokenNotFoundError":
        return f"the hub needs a valid token: log in with `hf auth login`, or set HF_TOKEN, and push to {repo!r} again"
    if status == 403:
        return (
            f"your token may not write to {repo!r}: use one with write access to {repo.partition('/')[0]!r} "
            "(`hf auth login`), or push to a name of your own"
        )
    return (
        f"cannot upload to {repo!r} at {constants.ENDPOINT} ({summary(error)}); check the network "
        "and push again: files that are already there are not sent twice"
    )
