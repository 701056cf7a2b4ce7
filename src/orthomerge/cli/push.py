import sys
from pathlib import Path
from typing import Annotated

import click

from orthomerge.cli.flags import Input, Parts, command
from orthomerge.cli.options import SavedModel
from orthomerge.core.errors import RecipeError


@command("push merged org/name --dry-run", "push merged org/name --private --yes")
def push(
    *,
    model: SavedModel,
    repo: Annotated[str, Input("Repository, created if it does not exist.", "ORG/NAME", positional=True)],
    private: Annotated[bool, Input("Make a new repository private.")] = False,
    revision: Annotated[str | None, Input("Branch, created if it does not exist.", "BRANCH", default="main")] = None,
    yes: Annotated[bool, Input("Upload without asking.", short="-y")] = False,
    dry_run: Annotated[bool, Input("Verify and list the files; upload nothing.")] = False,
) -> Parts:
    """Upload to the Hugging Face Hub.

    Only a model that verifies is uploaded. Log in with `hf auth login` first.
    """
    from orthomerge.models.pushing import plan_upload, send

    files = plan_upload(Path(model), repo, revision=revision)
    sizes = {name: file["size"] for name, file in files.items()}
    for name, size in sizes.items():
        yield f"{size:>15,}  {name}"
    where = repo + (f", branch {revision}" if revision else "")
    yield f"{len(sizes)} files, {sum(sizes.values()) / 1e6:,.1f} MB, verified; to {where}"
    if not dry_run and not yes:
        if not sys.stdin.isatty():
            raise RecipeError("an upload must be confirmed on a terminal; give --yes, or --dry-run to list the files")
        if not click.confirm(f"Upload to {repo} ({'private' if private else 'public'} if it is new)?"):
            raise SystemExit(1)
    address = None if dry_run else send(Path(model), repo, files, private=private, revision=revision)
    yield {"repo": repo, "revision": revision, "files": sizes, "commit": address}
    if address is not None:
        yield f"uploaded: {address}"
