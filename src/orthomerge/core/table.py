"""Tables, their forms as Markdown and LaTeX, and plain values as CSV.

Texts may come from any file and are never markup: every format passes them through `plain` and escapes its own markup.
"""

from __future__ import annotations

import csv
import html
import io
import math
import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Value = str | int | float | None

_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "★": r"$\star$", "↑": r"$\uparrow$", "↓": r"$\downarrow$",
    "≈": r"$\approx$",
}  # fmt: skip
# An underscore between letters or digits needs no escape.
_MARKDOWN = re.compile(r"[\\|*`\[\]~]|(?<![^\W_])_|_(?![^\W_])")
_FORMULA = tuple("=+-@＝＋－＠")


@dataclass(frozen=True)
class Column:
    """A column. With `wrap`, texts are wrapped if the table is wider than the terminal."""

    name: str
    align: Literal["left", "right"] = "left"
    wrap: bool = False


@dataclass(frozen=True)
class Cell:
    """`text` for people, `value` for programs: an unrounded number, a full hash. `best`: whether it is highlighted."""

    text: str
    value: Value = None
    best: bool = False

    def shown(self, escape: Callable[[str], str], *, best: str) -> str:
        """Return the escaped text. `best`: the format of a highlighted cell."""
        text = escape(self.text)
        return best.format(text) if self.best else text


@dataclass(frozen=True)
class Table:
    """Rows of cells under a title, and a note below them."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    @classmethod
    def of(
        cls,
        title: str,
        columns: Iterable[str],
        rows: Iterable[Iterable[Cell | Value]],
        *,
        left: int = 1,
        wrap: Container[str] = (),
        note: str = "",
    ) -> Table:
        """Make a table of plain values. The first `left` columns are text, the others numbers; `wrap`: names."""
        typed = (Column(name, "left" if place < left else "right", name in wrap) for place, name in enumerate(columns))
        return cls(title, tuple(typed), tuple(tuple(map(_cell, row)) for row in rows), note)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @property
    def texts(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(cell.text for cell in row) for row in self.rows)

    def markdown(self) -> str:
        rule = "|" + "".join("---|" if column.align == "left" else "---:|" for column in self.columns)
        rows = ([cell.shown(markdown_escape, best="**{}**") for cell in row] for row in self.rows)
        head, *body = (f"| {' | '.join(cells)} |" for cells in (map(markdown_escape, self.names), *rows))
        note = ("", markdown_escape(self.note)) if self.note else ()
        return "\n".join((f"### {markdown_escape(self.title)}", "", head, rule, *body, *note))

    def latex(self, label: str) -> str:
        """Format as a floating table for booktabs, with title and note."""
        rows = ([cell.shown(latex_escape, best=r"\textbf{{{}}}") for cell in row] for row in self.rows)
        note = [rf"\par\smallskip\footnotesize {latex_escape(self.note)}"] if self.note else []
        lines = [
            "% needs \\usepackage{booktabs}",
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{latex_escape(self.title)}}}",
            rf"\label{{tab:{re.sub(r'[^a-z0-9-]+', '-', label.lower())}}}",
            rf"\begin{{tabular}}{{{''.join(column.align[0] for column in self.columns)}}}",
            r"\toprule",
            " & ".join(map(latex_escape, self.names)) + r" \\",
            r"\midrule",
            *(" & ".join(row) + r" \\" for row in rows),
            r"\bottomrule",
            r"\end{tabular}",
            *note,
            r"\end{table}",
        ]
        return "\n".join(lines) + "\n"

    def json_rows(self) -> list[dict[str, Value]]:
        """Return one mapping per row, from column to value; None for an empty text."""
        rows = ([cell.text or None if cell.value is None else cell.value for cell in row] for row in self.rows)
        return [dict(zip(self.names, row, strict=True)) for row in rows]


def number(value: float | None, form: str = ".1f", *, best: bool = False) -> Cell:
    return Cell("") if value is None else Cell(format(value, form), value, best)


def span(low: float, high: float) -> Cell:
    return Cell(f"{low:.1f}-{high:.1f}")


def plain(text: str) -> str:
    """Return a text as one line; unprintable characters become escapes."""
    line = " ".join(text.split())
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)


def markdown_escape(text: str) -> str:
    return _MARKDOWN.sub(r"\\\g<0>", html.escape(plain(text), quote=False))


def latex_escape(text: str) -> str:
    """Escape a text for TeX; a range of numbers gets an en dash."""
    if re.fullmatch(r"\d+\.\d-\d+\.\d", text):
        return text.replace("-", "--")
    if re.fullmatch(r"[+-]\d+(\.\d+)?( to [+-]\d+(\.\d+)?)?", text):
        return text.replace("-", "$-$")
    return "".join(_LATEX.get(letter, letter) for letter in plain(text))


def csv_text(columns: Sequence[str], rows: Iterable[Iterable[Value]]) -> str:
    """Format rows as CSV: numbers unrounded, missing values empty; texts that look like formulas get an apostrophe."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([_csv_cell(column) for column in columns])
    writer.writerows([_csv_cell(value) for value in row] for row in rows)
    return out.getvalue()


def _csv_cell(value: Value) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str):
        # `plain` replaces a carriage return, which the writer would not quote.
        text = plain(value)
        return f"'{text}" if text.startswith(_FORMULA) else text
    return repr(value)


def _cell(value: Cell | Value) -> Cell:
    if isinstance(value, Cell):
        return value
    return Cell("" if value is None else str(value), None if isinstance(value, str) else value)
