"""Uploading an output folder to the hub, through huggingface_hub.

Only what verifies is uploaded. Files that an earlier push left under `encoder/` and `heads/` and that this output does
not have are removed in the same go, since old shards beside new ones would make neither readable; all else in the
repository stays.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from orthomerge.checkpoints.hub import is_hub_id
from orthomerge.checkpoints.publish import MANIFEST
from orthomerge.errors import OutputError, RecipeError, some
from orthomerge.manifest import read_manifest
from orthomerge.merged import verify

__all__ = ["Upload", "plan_upload", "push", "send"]

_OURS = ["encoder/*", "heads/*"]
_BRANCH = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,198}[A-Za-z0-9_])?")


@dataclass(frozen=True)
class Upload:
    """What goes where: sizes in bytes by file name."""

    out: Path
    repo: str
    revision: str | None
    private: bool
    files: dict[str, int]

    @property
    def size(self) -> int:
        return sum(self.files.values())


def plan_upload(path: str | Path, repo: str, *, private: bool = False, revision: str | None = None) -> Upload:
    """Check an output and the names; nothing is sent."""
    out = Path(path)
    if not is_hub_id(repo) or "@" in repo:
        raise RecipeError(f"{repo!r} must name a repository of the hub as org/name; for a branch, give --revision")
    if revision is not None and (not _BRANCH.fullmatch(revision) or ".." in revision or "//" in revision):
        raise RecipeError(f"--revision must be the name of a branch, got {revision!r:.80}")
    problems = verify(out)
    if problems:
        raise OutputError(
            f"{out} is not what was written, so it is not uploaded: {some(problems)}; merge again, or fetch it again"
        )
    names = [*read_manifest(out)["files"], MANIFEST]
    return Upload(out, repo, revision, private, {name: (out / name).stat().st_size for name in sorted(names)})


def push(path: str | Path, repo: str, *, private: bool = False, revision: str | None = None) -> str:
    """Upload an output folder to `repo` (org/name), which is made if it is not there; the address of the commit.

    `private`: of a repository that is made now. `revision`: a branch, made if it is not there; main if None. The token
    is that of `hf auth login`, or HF_TOKEN.
    """
    return send(plan_upload(path, repo, private=private, revision=revision))


def send(upload: Upload) -> str:
    """Carry out what was planned; the address of the commit."""
    try:
        from huggingface_hub import HfApi, constants
    except ImportError as error:
        raise RecipeError("uploading needs huggingface_hub: pip install 'orthomerge[hub]'") from error
    if constants.HF_HUB_OFFLINE:
        raise OutputError("HF_HUB_OFFLINE forbids uploading; unset it, and push again")
    api = HfApi(library_name="orthomerge")
    try:
        api.create_repo(upload.repo, private=upload.private, repo_type="model", exist_ok=True)
        if upload.revision is not None:
            api.create_branch(upload.repo, branch=upload.revision, exist_ok=True)
        done = api.upload_folder(
            repo_id=upload.repo,
            folder_path=upload.out,
            revision=upload.revision,
            commit_message="Upload a merge made by orthomerge",
            delete_patterns=_OURS,
        )
    except Exception as error:  # the hub's HTTP library has changed twice, and each brings errors of its own
        raise OutputError(_explain(error, upload.repo)) from error
    return str(done.commit_url)


def _explain(error: Exception, repo: str) -> str:
    """What went wrong, and the way out."""
    from huggingface_hub import constants

    status = getattr(getattr(error, "response", None), "status_code", None)
    missing = type(error).__name__ == "LocalTokenNotFoundError"
    if status == 401 or missing:
        return f"the hub does not know you: log in with `hf auth login`, or set HF_TOKEN, and push to {repo!r} again"
    if status == 403:
        return (
            f"your token may not write to {repo!r}: use one with write access to {repo.partition('/')[0]!r} "
            "(`hf auth login`), or push to a name of your own"
        )
    lines = str(error).strip().splitlines() or [""]
    return (
        f"cannot upload to {repo!r} at {constants.ENDPOINT} ({type(error).__name__}: {lines[0]}); check the network "
        "and push again: what is there already is not sent twice"
    )
