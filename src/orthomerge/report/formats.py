"""Sheets as Markdown, LaTeX and CSV. What stands in a cell may come from anywhere and is never markup."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from orthomerge.evaluation.tables import Sheet

__all__ = ["Value", "csv_text", "encoded", "latex", "latex_escape", "markdown", "plain"]

_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "★": r"$\star$", "↑": r"$\uparrow$", "↓": r"$\downarrow$",
    "≈": r"$\approx$",
}  # fmt: skip
_MARKDOWN = re.compile(r"([\\|*`\[\]])")
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_FORMULA = ("=", "+", "-", "@", "\t", "\r")

Value = str | int | float | None


def plain(text: str) -> str:
    """On one line, without characters that cannot be seen."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def encoded(text: str) -> bytes:
    """UTF-8; half of a character, which JSON can hold, becomes a question mark."""
    return text.encode("utf-8", errors="replace")


def markdown(sheet: Sheet, *, bold: Iterable[int] = ()) -> str:
    """As `Sheet.markdown`, with every text escaped; `bold`: rows whose mean stands out."""
    strong = set(bold)
    rows = [tuple(map(_markdown_cell, row)) for row in sheet.rows]
    mean = sheet.columns.index("mean") if "mean" in sheet.columns else -1
    rows = [
        tuple(f"**{cell}**" if number in strong and place == mean else cell for place, cell in enumerate(row))
        for number, row in enumerate(rows)
    ]
    columns = tuple(map(_markdown_cell, sheet.columns))
    escaped = replace(sheet, title=_markdown_cell(sheet.title), columns=columns, rows=tuple(rows))
    return replace(escaped, note=_markdown_cell(sheet.note)).markdown() + "\n"


def latex(sheet: Sheet, *, label: str, bold: Iterable[int] = ()) -> str:
    """A table for booktabs; `bold`: rows whose mean stands out."""
    strong = set(bold)
    mean = sheet.columns.index("mean") if "mean" in sheet.columns else -1
    kinds = "l" * sheet.left + "r" * (len(sheet.columns) - sheet.left)
    body = []
    for number, row in enumerate(sheet.rows):
        cells = [latex_escape(cell) for cell in row]
        if number in strong and mean >= 0:
            cells[mean] = rf"\textbf{{{cells[mean]}}}"
        body.append(" & ".join(cells) + r" \\")
    note = [rf"\par\smallskip\footnotesize {latex_escape(sheet.note)}"] if sheet.note else []
    lines = [
        "% needs \\usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex_escape(sheet.title)}}}",
        rf"\label{{tab:{re.sub(r'[^a-z0-9-]+', '-', label.lower())}}}",
        rf"\begin{{tabular}}{{{kinds}}}",
        r"\toprule",
        " & ".join(map(latex_escape, sheet.columns)) + r" \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        *note,
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def latex_escape(text: str) -> str:
    """So that TeX prints what is written; a range of numbers gets its dash."""
    if re.fullmatch(r"\d+\.\d-\d+\.\d", text):
        return text.replace("-", "--")
    if re.match(r"[+-]\d", text):
        return re.sub(r"-(?=\d)", "$-$", text).replace("%", r"\%")
    return "".join(_LATEX.get(letter, letter) for letter in plain(text))


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Value]]) -> str:
    """Numbers as they are, nothing for what is missing; a text that a spreadsheet would compute gets an apostrophe."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([_csv_cell(column) for column in columns])
    writer.writerows([_csv_cell(value) for value in row] for row in rows)
    return out.getvalue()


def _csv_cell(value: Value) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str):
        return f"'{value}" if value.startswith(_FORMULA) else value
    return repr(value)


def _markdown_cell(text: str) -> str:
    escaped = "".join(_HTML.get(letter, letter) for letter in plain(text))
    return _MARKDOWN.sub(r"\\\1", escaped)
