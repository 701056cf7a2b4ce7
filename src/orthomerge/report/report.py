"""A run folder as a page, and beside it every figure and table as files of their own.

OUT.html               the page; works alone
OUT_files/figures/     each figure as PNG, SVG and CSV
OUT_files/tables/      each table as Markdown, CSV and LaTeX
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orthomerge.analysis.figures import Figure
from orthomerge.core.errors import OutputError, RecipeError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.evaluation.comparisons import comparison_tables
from orthomerge.files.documents import read_json
from orthomerge.files.folders import REPORT, check_no_output, listed_files, write_marker
from orthomerge.files.publish import check_target, publish
from orthomerge.files.replacing import replacing
from orthomerge.report.drawing import draw
from orthomerge.report.figure_data import figure_csv
from orthomerge.report.material import Material, read_material
from orthomerge.report.page import Plate, encoded, page
from orthomerge.report.story import story, story_bars
from orthomerge.report.tables import Board, board_csv, board_table, boards, comparisons_csv

_KEY = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Written:
    """What a report consists of; `size`: bytes of the page."""

    page: Path
    files: Path
    size: int
    figures: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)


def report(run: Path, out: Path, *, title: str | None = None, progress: Progress = SILENT) -> Written:
    """Write the page `out` and the folder of its files: whole, or as they were before."""
    files = _checked(out)
    material = read_material(run)
    rows = boards(material.records, material.comparisons)
    summary = story(rows, method=material.diagnosis.method if material.diagnosis else None)
    figures = _figures(material, story_bars(summary))
    progress.stage(f"drawing {len(figures)} figures", None)
    plates = [Plate(figure, draw(figure)) for figure in figures]
    tables = _tables(rows, material)
    heading = title or f"{material.suite or material.name}: one model from many"
    text = page(material, title=heading, boards=rows, summary=summary, plates=plates, files=tables)
    _write(out, files, text=text, plates=plates, tables=tables)
    keys = [figure.key for figure in figures]
    return Written(out, files, len(encoded(text)), keys, sorted({name.partition(".")[0] for name in tables}))


def _figures(material: Material, bars: Figure | None) -> list[Figure]:
    """Those of the diagnosis, after the bars of the story unless the diagnosis has accuracies by task."""
    figures = list(material.diagnosis.figures) if material.diagnosis else []
    keys = [figure.key for figure in figures]
    for key in keys:
        if not _KEY.fullmatch(key):
            raise RecipeError(f"the figure {key!r:.80} must have a key of lower-case letters, digits and dashes")
        if keys.count(key) > 1:
            raise RecipeError(f"two figures of the diagnosis have the key {key!r}; diagnose again")
    return figures if bars is None or {bars.key, "accuracy"} & set(keys) else [bars, *figures]


def _tables(rows: Sequence[Board], material: Material) -> dict[str, str]:
    """Texts by file name."""
    texts = {}
    for board in rows:
        table = board_table(board)
        texts[f"{board.key}.md"] = table.markdown() + "\n"
        texts[f"{board.key}.csv"] = board_csv(board)
        texts[f"{board.key}.tex"] = table.latex(f"accuracy-{board.key}")
    if tables := comparison_tables(material.comparisons):
        texts["comparisons.md"] = "\n\n".join(table.markdown() for table in tables) + "\n"
        texts["comparisons.csv"] = comparisons_csv(material.comparisons)
        texts["comparisons.tex"] = "\n".join(table.latex(f"comparison-{n}") for n, table in enumerate(tables, 1))
    return texts


def _checked(out: Path) -> Path:
    """The folder of files; refuses to replace anything but an earlier report that has no other file in its folder."""
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


def _write(out: Path, files: Path, *, text: str, plates: Sequence[Plate], tables: dict[str, str]) -> None:
    """Page and folder are written in full before either is replaced; then the folder is, and the page right after."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as page_file:
            page_file.write(encoded(text))
            page_file.flush()
            os.fsync(page_file.fileno())
            with publish(files, force=True, marker=REPORT) as folder:
                for name in ("figures", "tables"):
                    (folder / name).mkdir()
                for plate in plates:
                    place = folder / "figures" / plate.figure.key
                    place.with_suffix(".svg").write_text(plate.drawn.svg, encoding="utf-8")
                    place.with_suffix(".png").write_bytes(plate.drawn.png)
                    place.with_suffix(".csv").write_bytes(encoded(figure_csv(plate.figure)))
                for name, table in tables.items():
                    (folder / "tables" / name).write_bytes(encoded(table))
                write_marker(folder, REPORT, page=out.name)
    except OSError as error:
        raise OutputError(f"cannot write {out}: {error.strerror or error}") from error
