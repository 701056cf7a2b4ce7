"""A run folder as a page, and beside it every figure and table as files of their own.

OUT.html               the page; works alone
OUT_files/figures/     each figure as PNG, SVG and CSV
OUT_files/tables/      each table as Markdown, CSV and LaTeX
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orthomerge.analysis.figures import Figure
from orthomerge.errors import OutputError, RecipeError
from orthomerge.evaluation.comparisons import comparison_tables
from orthomerge.report.drawing import draw
from orthomerge.report.figure_data import figure_csv
from orthomerge.report.page import Plate, encoded, page
from orthomerge.report.reading import Material, read_material
from orthomerge.report.story import story, story_bars
from orthomerge.report.tables import Board, board_csv, board_table, boards, comparisons_csv

__all__ = ["Written", "report"]

_MARKER = ".orthomerge-report"
_OVERVIEW = "accuracy"  # a diagnosis has it by task already
_KEY = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Written:
    """What a report consists of; `size`: bytes of the page."""

    page: Path
    files: Path
    size: int
    figures: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)


def report(
    run: Path, out: Path, *, title: str | None = None, say: Callable[[str], None] = lambda text: None
) -> Written:
    """Write the page `out` and the folder of its files: whole, or as they were before."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise RecipeError(f"--out must be the name of an .html file, got {str(out)!r}")
    files = out.with_name(f"{out.stem}_files")
    _check(out, files)
    material = read_material(run)
    found = boards(material.records, material.comparisons)
    told = story(found, method=material.diagnosis.method if material.diagnosis else None)
    bars = story_bars(told)
    figures = _figures(material, bars)
    say(f"drawing {len(figures)} figures")
    plates = [Plate(figure, draw(figure)) for figure in figures]
    tables = _tables(found, material)
    heading = title or _title(material)
    text = page(material, title=heading, boards=found, told=told, plates=plates, files=tables)
    _write(out, files, text=text, plates=plates, tables=tables)
    keys = [figure.key for figure in figures]
    return Written(out, files, len(encoded(text)), keys, sorted({name.partition(".")[0] for name in tables}))


def _title(material: Material) -> str:
    suite = next((record.suite for record in material.records if record.suite), None)
    return f"{suite or material.name}: one model from many"


def _figures(material: Material, bars: Figure | None) -> list[Figure]:
    found = list(material.diagnosis.figures) if material.diagnosis else []
    keys = [figure.key for figure in found]
    for key in keys:
        if not _KEY.fullmatch(key):
            raise RecipeError(f"the figure {key!r:.80} must have a key of lower-case letters, digits and dashes")
        if keys.count(key) > 1:
            raise RecipeError(f"two figures of the diagnosis have the key {key!r}; diagnose again")
    told = bars is None or not {bars.key, _OVERVIEW}.isdisjoint(keys)
    return found if told or bars is None else [bars, *found]


def _tables(found: Sequence[Board], material: Material) -> dict[str, str]:
    """Texts by file name."""
    texts = {}
    for board in found:
        table = board_table(board)
        texts[f"{board.key}.md"] = table.markdown() + "\n"
        texts[f"{board.key}.csv"] = board_csv(board)
        texts[f"{board.key}.tex"] = table.latex(f"accuracy-{board.key}")
    if material.comparisons:
        tables = comparison_tables(material.comparisons)
        texts["comparisons.md"] = "\n\n".join(table.markdown() for table in tables) + "\n"
        texts["comparisons.csv"] = comparisons_csv(material.comparisons)
        texts["comparisons.tex"] = "\n".join(
            table.latex(f"comparison-{number}") for number, table in enumerate(tables, 1)
        )
    return texts


def _check(out: Path, files: Path) -> None:
    """The page may be written again; a folder that is not ours is left alone."""
    if out.is_dir():
        raise OutputError(f"{out} is a folder; give the name of an .html file")
    if files.exists() and not (files / _MARKER).is_file():
        raise OutputError(f"{files} is there already and no report of ours; give another --out, or move it away")


def _write(out: Path, files: Path, *, text: str, plates: Sequence[Plate], tables: dict[str, str]) -> None:
    partial, old = (files.with_name(f".{files.name}.{what}") for what in ("partial", "old"))
    half = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for stale in (partial, old):
            shutil.rmtree(stale, ignore_errors=True)
        _fill(partial, plates, tables)
        half.write_bytes(encoded(text))
        if files.exists():
            files.rename(old)
        try:
            partial.rename(files)
            half.replace(out)
        except OSError:
            _put_back(files, old)
            raise
    except OSError as error:
        raise OutputError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        half.unlink(missing_ok=True)
        for rest in (partial, old):
            shutil.rmtree(rest, ignore_errors=True)


def _put_back(files: Path, old: Path) -> None:
    """The folder as it was, for the page is."""
    shutil.rmtree(files, ignore_errors=True)
    if old.exists():
        old.rename(files)


def _fill(folder: Path, plates: Sequence[Plate], tables: dict[str, str]) -> None:
    (folder / "figures").mkdir(parents=True)
    (folder / "tables").mkdir()
    (folder / _MARKER).write_text("written by orthomerge report; the next one replaces this folder\n")
    for plate in plates:
        place = folder / "figures" / plate.figure.key
        place.with_suffix(".svg").write_text(plate.drawn.svg, encoding="utf-8")
        place.with_suffix(".png").write_bytes(plate.drawn.png)
        place.with_suffix(".csv").write_bytes(encoded(figure_csv(plate.figure)))
    for name, text in tables.items():
        (folder / "tables" / name).write_bytes(encoded(text))
