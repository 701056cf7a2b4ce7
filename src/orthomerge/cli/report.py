"""The command `report`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import click

from orthomerge.cli.flags import Flag, command
from orthomerge.cli.options import Display
from orthomerge.cli.printing import print_json


@dataclass(frozen=True)
class Input:
    """The run, and the page of it."""

    run: Annotated[str, Flag("Run folder of `run`, `evaluate` or `diagnose`.", "RUN", positional=True)]
    out: Annotated[str, Flag("The page; its figures and tables go beside it.", "PAGE.html", short="-o")]
    title: Annotated[str | None, Flag("The heading.", "TEXT", default="the suite's or run's name")] = None


@command(usage=("report RUN --out PAGE.html [OPTIONS]",), examples=("report run --out report.html",))
def report(given: Input, display: Display) -> None:
    """Render a run as one page that opens anywhere.

    Its figures and tables are written as files too. No model is needed.
    """
    from orthomerge.report.report import report as write

    written = write(Path(given.run), Path(given.out), title=given.title)
    if display.json:
        print_json(asdict(written))
        return
    click.echo(f"{written.page} ({written.size / 1e6:.1f} MB, works alone)")
    click.echo(
        f"{len(written.figures)} figures as PNG, SVG and CSV, {len(written.tables)} tables as Markdown, CSV and LaTeX:"
    )
    click.echo(f"{written.files}")
