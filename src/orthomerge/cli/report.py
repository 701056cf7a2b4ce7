from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import orthomerge as om
from orthomerge.cli.flags import Input, Output, Parts, command


@command("report run --out report.html")
def report(
    *,
    run: Annotated[str, Input("Run folder of `run`, `evaluate` or `diagnose`.", "RUN", positional=True)],
    title: Annotated[str | None, Input("Heading of the page.", "TEXT", default="name of suite or run")] = None,
    out: Annotated[str, Output("Page to write; its files are written beside it.", "PAGE.html", short="-o")],
) -> Parts:
    """Render a run as one self-contained HTML page.

    Its figures and tables are written as files too. No model is needed.
    """
    written = om.report(Path(run), Path(out), title=title)
    yield asdict(written)
    yield f"{written.page} ({written.size / 1e6:.1f} MB, self-contained)"
    yield (
        f"{len(written.figures)} figures as PNG, SVG and CSV, "
        f"{len(written.tables)} tables as Markdown, CSV and LaTeX:\n{written.files}"
    )
