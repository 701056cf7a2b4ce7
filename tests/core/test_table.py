"""One table in all its forms, by hand."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable

import pytest

from orthomerge.core.table import Table, csv_text, latex_escape, markdown_escape, number, plain

SCRIPT = "<script>alert(1)</script>"
BIDI = "a\u202eb"
SIGNS = ["=1+1", "+1", "-1", "@SUM(A1)", "＝1", "＋1", "－1", "＠SUM"]

SCORES = Table.of(
    "Scores & more",
    ("method", "mean", "n"),
    (("ties", number(84.04, best=True), 2), ("a|b_c", number(None), 1_000)),
    note="In percent.",
)


def test_markdown() -> None:
    assert SCORES.markdown().split("\n") == [
        "### Scores &amp; more",
        "",
        "| method | mean | n |",
        "|---|---:|---:|",
        "| ties | **84.0** | 2 |",
        r"| a\|b_c |  | 1000 |",
        "",
        "In percent.",
    ]


def test_latex() -> None:
    assert SCORES.latex("Scores: all_of them").split("\n") == [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        r"\caption{Scores \& more}",
        r"\label{tab:scores-all-of-them}",
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"method & mean & n \\",
        r"\midrule",
        r"ties & \textbf{84.0} & 2 \\",
        r"a\textbar{}b\_c &  & 1000 \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\par\smallskip\footnotesize In percent.",
        r"\end{table}",
        "",
    ]


def test_programs_read_numbers_that_are_not_rounded() -> None:
    assert SCORES.json_rows() == [
        {"method": "ties", "mean": 84.04, "n": 2},
        {"method": "a|b_c", "mean": None, "n": 1000},
    ]


PLAIN = [
    ("two\nlines\r\tand  more ", "two lines and more"),
    ("\x1b[31mred\x9b", r"\x1b[31mred\x9b"),
    (BIDI, r"a\u202eb"),
    ("\ud83d", r"\ud83d"),
    ("日本 é", "日本 é"),
]
LATEX = [
    ("a_b & 50 %", r"a\_b \& 50 \%"),
    (r"\input{/etc/passwd}", r"\textbackslash{}input\{/etc/passwd\}"),
    (r"-1\input{x}", r"-1\textbackslash{}input\{x\}"),
    ("$x^2$ ~ #1", r"\$x\textasciicircum{}2\$ \textasciitilde{} \#1"),
    (SCRIPT, r"\textless{}script\textgreater{}alert(1)\textless{}/script\textgreater{}"),
    ("two\nlines\t|", r"two lines \textbar{}"),
    ("82.6-85.4", "82.6--85.4"),
    ("-13.8", "$-$13.8"),
    ("-19.7 to +16.8", "$-$19.7 to +16.8"),
    ("★ ↓≈", r"$\star$ $\downarrow$$\approx$"),
]
MARKDOWN = [
    ("a|b `c` " + SCRIPT, r"a\|b \`c\` &lt;script&gt;alert(1)&lt;/script&gt;"),
    ("![x](http://y)", r"!\[x\](http://y)"),
    ("*a* _b_ __c__ ~~d~~ task_arithmetic", r"\*a\* \_b\_ \_\_c\_\_ \~\~d\~\~ task_arithmetic"),
    ("a\n# b", "a # b"),
]


@pytest.mark.parametrize(
    ("escape", "text", "escaped"),
    [
        (escape, *case)
        for escape, cases in ((plain, PLAIN), (latex_escape, LATEX), (markdown_escape, MARKDOWN))
        for case in cases
    ],
)
def test_every_form_shows_what_is_written(escape: Callable[[str], str], text: str, escaped: str) -> None:
    assert escape(text) == escaped


def test_no_form_passes_on_what_cannot_be_seen() -> None:
    table = Table.of(BIDI, (BIDI,), ((f"\x1b[2J{BIDI}\r\x85\ud83d",),), note=BIDI)
    for form in (table.markdown(), table.latex(BIDI), csv_text([BIDI], [[BIDI]])):
        assert all(letter == "\n" or letter.isprintable() for letter in form)
        assert "u202eb" in form
        form.encode()


@pytest.mark.parametrize("text", SIGNS)
@pytest.mark.parametrize("before", ["", "\t", "\r", " ", "\n"])
def test_csv_computes_no_text(text: str, before: str) -> None:
    (head, row) = csv.reader(io.StringIO(csv_text(["name", before + text], [[before + text, -1.5]])))
    assert head[1] == f"'{text}"
    assert row == [f"'{text}", "-1.5"]


def test_a_carriage_return_begins_no_cell() -> None:
    """Spreadsheets end a row at one that is not quoted."""
    text = csv_text(["name", "n"], [["a\r=1+1", 1], ["b\r\n=1+1", 2]])
    assert text == "name,n\na =1+1,1\nb =1+1,2\n"


def test_csv_leaves_holes_for_what_is_missing() -> None:
    assert csv_text(["a", "b"], [[math.nan, None], [1, "x,y"]]) == 'a,b\n,\n1,"x,y"\n'
