"""The command `report`: parse, call the library, say where the page is."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from orthomerge.cli.options import Json


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder: what `evaluate` and `diagnose` wrote.")],
    out: Annotated[str, typer.Option("--out", help="The page; its figures and tables go into a folder beside it.")],
    title: Annotated[str | None, typer.Option("--title", help="The heading, instead of the suite's name.")] = None,
    as_json: Json = False,
) -> None:
    """Make one page of a run that opens anywhere, and its figures and tables as files. No model is needed."""
    from orthomerge.cli.printing import print_json
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
