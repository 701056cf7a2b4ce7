from pathlib import Path
from tempfile import TemporaryDirectory

from orthomerge.models.model import Model
from orthomerge.models.pushing import plan_upload, send


def push(model: Model | str | Path, repo: str, *, private: bool = False, revision: str | None = None) -> str:
    """Upload a model, or a folder that verifies, to `repo` (org/name) on the Hub; return the address of the commit.

    `private`: make a new repository private. `revision`: a branch, main if None. The token is HF_TOKEN, or that of
    `hf auth login`.
    """
    if not isinstance(model, Model):
        return send(plan_upload(model, repo, private=private, revision=revision))
    with TemporaryDirectory() as folder:
        out = Path(folder) / "model"
        model.save(out)
        return send(plan_upload(out, repo, private=private, revision=revision))
