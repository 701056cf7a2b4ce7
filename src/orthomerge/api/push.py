from pathlib import Path
from tempfile import TemporaryDirectory

from orthomerge.models.model import Model
from orthomerge.models.pushing import plan_upload, send


def push(model: Model | str | Path, repo: str, *, private: bool = False, revision: str | None = None) -> str:
    """Upload a model, or a folder that verifies, to `repo` (org/name) on the Hub; return the address of the commit.

    `private`: make a new repository private. `revision`: a branch, main if None. The token is HF_TOKEN, or that of
    `hf auth login`.
    """
    if isinstance(model, Model):
        with TemporaryDirectory() as folder:
            model.save(Path(folder) / "model")
            return push(Path(folder) / "model", repo, private=private, revision=revision)
    return send(
        Path(model), repo, plan_upload(Path(model), repo, revision=revision), private=private, revision=revision
    )
