"""The command `push`: parse, ask, call the library."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from orthomerge.cli.options import Json
from orthomerge.core.errors import RecipeError

if TYPE_CHECKING:
    from orthomerge.models.pushing import Upload


def push(
    path: Annotated[str, typer.Argument(metavar="OUT", help="A folder that `orthomerge merge` or `run` wrote.")],
    repo: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The repository; made if it is not there.")],
    private: Annotated[bool, typer.Option("--private", help="Of a repository that is made now.")] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="BRANCH", help="A branch, made if it is not there.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Verify, print what would be uploaded, and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Upload an output to the Hugging Face hub, if it verifies. Log in with `hf auth login` first."""
    from orthomerge.cli.printing import print_json
    from orthomerge.models.pushing import plan_upload, send

    upload = plan_upload(path, repo, private=private, revision=revision)
    if not as_json:
        _show(upload)
    if not dry_run and not yes:
        _ask(upload)
    address = None if dry_run else send(upload)
    if as_json:
        print_json({"repo": repo, "revision": revision, "files": upload.files, "commit": address})
    elif address is not None:
        typer.echo(f"uploaded: {address}")


def _show(upload: Upload) -> None:
    for name, size in upload.files.items():
        typer.echo(f"{size:>15,}  {name}")
    where = upload.repo + (f", branch {upload.revision}" if upload.revision else "")
    typer.echo(f"{len(upload.files)} files, {upload.size / 1e6:,.1f} MB, verified; to {where}")


def _ask(upload: Upload) -> None:
    if not sys.stdin.isatty():
        raise RecipeError(
            "nobody is there to be asked whether to upload; give --yes, or --dry-run to see what it would"
        )
    kind = "private" if upload.private else "public"
    if not typer.confirm(f"Upload to {upload.repo} ({kind}, if it is made now)?"):
        raise typer.Exit(1)
