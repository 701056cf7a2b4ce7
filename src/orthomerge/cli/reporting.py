"""What `report` does once its arguments are read."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from orthomerge.cli.commands import print_json

__all__ = ["report"]


def report(run: str, *, out: str, title: str | None, as_json: bool) -> None:
    """Say where the page is, and what lies beside it."""
    from orthomerge.report.report import report as write

    done = write(Path(run), Path(out), title=title)
    if as_json:
        print_json(asdict(done))
        return
    typer.echo(f"{done.page} ({done.size / 1e6:.1f} MB, works alone)")
    typer.echo(
        f"{len(done.figures)} figures as PNG, SVG and CSV, {len(done.tables)} tables as Markdown, CSV and LaTeX:"
    )
    typer.echo(f"{done.files}")
