"""Write a run folder as a page, with every figure and table as files beside it.

OUT.html               the page; self-contained
OUT_files/figures/     each figure as PNG, SVG and CSV
OUT_files/tables/      each table as Markdown, CSV and LaTeX

The page makes no requests, and its policy forbids them. Every text is escaped by the templates; what they mark as safe
comes from this package (styles, scripts, drawings of allowed elements, escaped JSON).
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from orthomerge.analysis.diagnosis import Figure, Points
from orthomerge.core.errors import OutputError, RecipeError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.core.table import plain
from orthomerge.core.version import VERSION
from orthomerge.evaluation.comparisons import comparison_tables
from orthomerge.files.documents import read_json
from orthomerge.files.folders import REPORT, check_no_output, listed_files, write_marker
from orthomerge.files.publish import check_target, publish
from orthomerge.files.replacing import replacing
from orthomerge.reporting.contents import RunContents, listed, numbers_of, read_contents, time_of
from orthomerge.reporting.drawing import DrawnFigure, draw
from orthomerge.reporting.figure_data import figure_csv, inline_svg, json_block, points_payload
from orthomerge.reporting.tables import (
    Board,
    Summary,
    board_csv,
    board_table,
    boards,
    comparisons_csv,
    legend,
    summarise,
    summary_bars,
)

_SCRIPTS = ("page.js", "tables.js", "points.js")
_KEY = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Written:
    """Files, figures and tables of a report. `size`: bytes of the page."""

    page: Path
    files: Path
    size: int
    figures: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)


def report(run: Path, out: Path, *, title: str | None = None, progress: Progress = SILENT) -> Written:
    """Write the page `out` and the folder of its files; after an error both are as before."""
    folder = _checked(out)
    contents = read_contents(run)
    rows = boards(contents.records, contents.comparisons)
    summary = summarise(rows, method=contents.diagnosis.method if contents.diagnosis else None)
    figures = _figures(contents, summary_bars(summary))
    progress.stage(f"drawing {len(figures)} figures", None)
    drawn = [draw(figure) for figure in figures]
    files = {**_figure_files(drawn), **_table_files(rows, contents)}
    heading = title or f"{contents.suite or contents.name}: one model from many"
    page = _encoded(_page(contents, title=heading, boards=rows, summary=summary, drawn=drawn, files=files))
    _write(out, page, folder, files)
    tables = {Path(name).stem for name in files if name.startswith("tables/")}
    return Written(out, folder, len(page), [figure.key for figure in figures], sorted(tables))


def _figures(contents: RunContents, bars: Figure | None) -> list[Figure]:
    """Return figures of the diagnosis, after the bars of the summary unless the diagnosis has accuracies by task."""
    figures = list(contents.diagnosis.figures) if contents.diagnosis else []
    keys = [figure.key for figure in figures]
    for key in keys:
        if not _KEY.fullmatch(key) or keys.count(key) > 1:
            what = "must have a key of its own, of lower-case letters, digits and dashes"
            raise RecipeError(f"the figure {key!r:.80} {what}; diagnose again")
    return figures if bars is None or {bars.key, "accuracy"} & set(keys) else [bars, *figures]


def _figure_files(drawn: Sequence[DrawnFigure]) -> dict[str, bytes]:
    files = {}
    for drawing in drawn:
        key = f"figures/{drawing.figure.key}"
        files[f"{key}.svg"] = _encoded(drawing.svg)
        files[f"{key}.png"] = drawing.png
        files[f"{key}.csv"] = _encoded(figure_csv(drawing.figure))
    return files


def _table_files(rows: Sequence[Board], contents: RunContents) -> dict[str, bytes]:
    texts = {}
    for board in rows:
        table = board_table(board)
        texts[f"{board.key}.md"] = table.markdown() + "\n"
        texts[f"{board.key}.csv"] = board_csv(board)
        texts[f"{board.key}.tex"] = table.latex(f"accuracy-{board.key}")
    if tables := comparison_tables(contents.comparisons):
        texts["comparisons.md"] = "\n\n".join(table.markdown() for table in tables) + "\n"
        texts["comparisons.csv"] = comparisons_csv(contents.comparisons)
        texts["comparisons.tex"] = "\n".join(table.latex(f"comparison-{n}") for n, table in enumerate(tables, 1))
    return {f"tables/{name}": _encoded(text) for name, text in texts.items()}


def _checked(out: Path) -> Path:
    """Return the folder of a report's files; only an earlier report without other files may be replaced."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise RecipeError(f"--out must be the name of an .html file, got {str(out)!r}")
    if out.is_dir():
        raise OutputError(f"{out} is a folder; give the name of an .html file")
    files = out.with_name(f"{out.stem}_files")
    check_no_output(out.parent)
    check_target(files, force=True, marker=REPORT)
    ours = listed_files(files / REPORT) is not None and read_json(files / REPORT).get("page") == out.name
    if os.path.lexists(out) and (out.is_symlink() or not ours):
        raise OutputError(f"{out} is there already and no report of ours; give another --out, or move it away")
    return files


def _write(out: Path, page: bytes, folder: Path, files: Mapping[str, bytes]) -> None:
    """Write page and folder in full, then replace the folder, and the page right after."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as page_file:
            page_file.write(page)
            page_file.flush()
            os.fsync(page_file.fileno())
            with publish(folder, force=True, marker=REPORT) as partial:
                for name in ("figures", "tables"):
                    (partial / name).mkdir()
                for name, content in files.items():
                    (partial / name).write_bytes(content)
                write_marker(partial, REPORT, page=out.name)
    except OSError as error:
        raise OutputError(f"cannot write {out}: {error.strerror or error}") from error


def _page(
    contents: RunContents,
    *,
    title: str,
    boards: Sequence[Board],
    summary: Summary,
    drawn: Sequence[DrawnFigure],
    files: Mapping[str, bytes],
) -> str:
    style, head, script = _asset("style.css"), _asset("head.js"), "\n".join(map(_asset, _SCRIPTS))
    plates = [_plate(each, f"f{number}-") for number, each in enumerate(drawn)]
    points = [drawing.figure for drawing in drawn if isinstance(drawing.figure, Points)]
    context = {
        **vars(contents),
        "title": title,
        "version": VERSION,
        "policy": _policy(style, head, script),
        "style": style,
        "head": head,
        "script": script,
        "summary": summary,
        "boards": boards,
        "comparisons": comparison_tables(contents.comparisons),
        "gallery": [plate for plate in plates if not plate["points"]],
        "static_points": [plate for plate in plates if plate["points"]],
        "points": json_block([points_payload(figure) for figure in points]) if points else None,
        "files": {name: _data_uri(name, content) for name, content in files.items()},
        "floor": _floor(boards),
        "best": next((row for board in boards for row in board.rows if row.best), None),
    }
    return str(templates().get_template("page.html").render(context))


def _encoded(text: str) -> bytes:
    """Encode as UTF-8; half of a surrogate pair, which JSON can contain, becomes a question mark."""
    return text.encode("utf-8", errors="replace")


def _plate(drawn: DrawnFigure, prefix: str) -> dict[str, Any]:
    """Prepare a figure for the template. `prefix`: put before every id."""
    figure, points = drawn.figure, isinstance(drawn.figure, Points)
    svg = inline_svg(drawn.text_svg, prefix=prefix, label=f"{figure.title}. {figure.caption}")
    forms = ["csv"] if points else ["csv", "svg"]  # an SVG of thousands of marks is too large for the page
    return {"figure": figure, "points": points, "wide": drawn.wide, "svg": svg, "forms": forms}


def _floor(boards: Sequence[Board]) -> float:
    """Return the start of the axis of intervals: below all rows but those of a joint label space."""
    lows = [row.low for board in boards for row in board.rows if row.way.protocol != "joint"]
    return min(90.0, 10 * (min(lows, default=0.0) // 10))


@cache
def templates() -> Any:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise RecipeError("a report needs jinja2; pip install 'orthomerge[report]'") from error
    environment = Environment(
        loader=PackageLoader("orthomerge.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(legend=legend)
    environment.filters.update(prose=_prose, listed=listed, numbers=numbers_of, time=time_of, size=decimal, plain=plain)
    return environment


def _prose(text: str) -> Any:
    """Escape a text; parts between backticks become code."""
    from markupsafe import Markup, escape

    parts = text.replace(" %", "\u00a0%").split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if place % 2 else escape(part) for place, part in enumerate(parts)
    )


def _asset(name: str) -> str:
    return (resources.files("orthomerge.reporting") / "templates" / name).read_text(encoding="utf-8").strip()


def _policy(style: str, *scripts: str) -> str:
    """Return the page's security policy, which allows only these styles and scripts and embedded images."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, *scripts)]
    first, *others = (f"'sha256-{digest}'" for digest in hashes)
    sources = f"img-src data:; style-src {first}; script-src {' '.join(others)}"
    return f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'"


def _data_uri(name: str, content: bytes) -> str:
    kind = {".svg": "image/svg+xml", ".png": "image/png", ".csv": "text/csv"}.get(Path(name).suffix, "text/plain")
    return f"data:{kind};charset=utf-8;base64,{base64.b64encode(content).decode()}"
