"""The command `push`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import click

from orthomerge.cli.flags import Flag, command
from orthomerge.cli.options import Display
from orthomerge.cli.printing import print_json
from orthomerge.core.errors import RecipeError

if TYPE_CHECKING:
    from orthomerge.models.pushing import Upload


@dataclass(frozen=True)
class Input:
    """What is uploaded, and where to."""

    model: Annotated[str, Flag("Folder of a merged model.", "MODEL", positional=True)]
    repo: Annotated[str, Flag("The repository; made if it is not there.", "ORG/NAME", positional=True)]
    private: Annotated[bool, Flag("Of a repository that is made now.")] = False
    revision: Annotated[str | None, Flag("A branch, made if it is not there.", "BRANCH", default="main")] = None
    yes: Annotated[bool, Flag("Do not ask.", short="-y")] = False
    dry_run: Annotated[bool, Flag("Verify, print what would be uploaded, and stop.")] = False


@command(
    usage=("push MODEL ORG/NAME [OPTIONS]",),
    examples=("push merged org/name --dry-run", "push merged org/name --private --yes"),
)
def push(given: Input, display: Display) -> None:
    """Upload to the Hugging Face Hub.

    Only a model that verifies is uploaded. Log in with `hf auth login` first.
    """
    from orthomerge.models.pushing import plan_upload, send

    upload = plan_upload(given.model, given.repo, private=given.private, revision=given.revision)
    if not display.json:
        _show(upload)
    if not given.dry_run and not given.yes:
        _ask(upload)
    address = None if given.dry_run else send(upload)
    if display.json:
        print_json({"repo": given.repo, "revision": given.revision, "files": upload.files, "commit": address})
    elif address is not None:
        click.echo(f"uploaded: {address}")


def _show(upload: Upload) -> None:
    for name, size in upload.files.items():
        click.echo(f"{size:>15,}  {name}")
    where = upload.repo + (f", branch {upload.revision}" if upload.revision else "")
    click.echo(f"{len(upload.files)} files, {upload.size / 1e6:,.1f} MB, verified; to {where}")


def _ask(upload: Upload) -> None:
    if not sys.stdin.isatty():
        raise RecipeError(
            "nobody is there to be asked whether to upload; give --yes, or --dry-run to see what it would"
        )
    kind = "private" if upload.private else "public"
    if not click.confirm(f"Upload to {upload.repo} ({kind}, if it is made now)?"):
        raise SystemExit(1)
