"""The command `report`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import click

import orthomerge as om
from orthomerge.cli.flags import Input, Output, command
from orthomerge.cli.options import Display
from orthomerge.cli.printing import print_json


@command(usage=("report RUN --out PAGE.html [OPTIONS]",), examples=("report run --out report.html",))
def report(
    *,
    run: Annotated[str, Input("Run folder of `run`, `evaluate` or `diagnose`.", "RUN", positional=True)],
    title: Annotated[str | None, Input("The heading.", "TEXT", default="the suite's or run's name")] = None,
    out: Annotated[str, Output("The page; its figures and tables go beside it.", "PAGE.html", short="-o")],
    display: Display,
) -> None:
    """Render a run as one page that opens anywhere.

    Its figures and tables are written as files too. No model is needed.
    """
    written = om.report(Path(run), Path(out), title=title)
    if display.json:
        print_json(asdict(written))
        return
    click.echo(f"{written.page} ({written.size / 1e6:.1f} MB, works alone)")
    click.echo(
        f"{len(written.figures)} figures as PNG, SVG and CSV, {len(written.tables)} tables as Markdown, CSV and LaTeX:"
    )
    click.echo(f"{written.files}")
