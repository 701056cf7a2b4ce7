"""The accuracy tables of a report, by hand."""

from __future__ import annotations

import csv
import io
import re

import pytest
from syrupy.assertion import SnapshotAssertion
from tests.reporting.making import ALERT, BREAK_OUT, comparison, record, small_run

from orthomerge.core.table import Cell, Table, number
from orthomerge.evaluation.comparisons import Comparison
from orthomerge.reporting.report import templates
from orthomerge.reporting.tables import board_csv, board_table, boards, comparisons_csv, legend

RUN = small_run()
TASKS = ("a", "b")


def compared() -> list[Comparison]:
    rows = {(item.method, item.access, item.aligner): item for item in RUN if item.task == "a"}
    ties, average = rows["ties", "inductive", "auto"], rows["average", "inductive", "auto"]
    plain, expert = rows["ties", "data-free", None], rows["expert", "data-free", None]
    return [
        comparison(average, ties, verdict="worse, but comparable", tasks=TASKS),
        comparison(plain, expert, verdict="worse", tasks=TASKS, worse=("b",)),
    ]


def test_access_classes_are_never_mixed_and_joint_rows_come_last() -> None:
    tables = boards([*(record(task, "ties", 0.1, protocol="joint") for task in TASKS), *RUN], compared())
    assert [board.key for board in tables] == ["inductive", "data-free", "transductive"]
    assert all({row.way.access for row in board.rows} == {board.key} for board in tables)
    assert [row.way.protocol for row in tables[1].rows] == ["current", "current", "joint"]


def test_numbers_of_a_row_and_marks() -> None:
    inductive, free, transductive = boards(RUN, compared())
    row = inductive.rows[0]
    assert (row.method, row.way.title) == ("ties", "aligner auto")
    # 86 and 82; each interval reaches 2 points either way, so the mean's sqrt(4 + 4) / 2.
    assert (row.mean, row.low) == pytest.approx((84, 84 - 2**0.5))
    score = row.scores["a"]
    assert (score.value, score.low, score.high) == pytest.approx((86, 84, 88))
    assert score.examples == 100
    assert transductive.rows[0].extra == 1234
    assert [row.extra for row in free.rows] == [0, 0]
    assert [row.mark for row in inductive.rows] == ["★", "↓≈"]
    assert [row.mark for row in free.rows] == ["★", "↓"]
    assert free.rows[1].apart == {"b": "worse"}
    assert "less than 1 point apart" in legend(inductive)
    assert legend(transductive) == ""
    assert "ref." not in board_table(transductive).names


def test_the_best_adds_nothing_and_is_a_merge() -> None:
    inductive, free, transductive = boards(RUN)
    assert [row.best for row in inductive.rows] == [True, False]
    assert [(row.method, row.best) for row in free.rows] == [("expert", False), ("ties", True)]
    assert [row.best for row in transductive.rows] == [False]
    # A probe is not, nor a method on fewer tasks.
    rows = [*RUN, *(record(task, "ties", 0.99, protocol="probe", access="inductive") for task in TASKS)]
    rows.append(record("a", "wudi", 0.99, access="inductive"))
    assert [row.way.title for row in boards(rows)[0].rows if row.best] == ["aligner auto"]


@pytest.mark.parametrize("form", ["markdown", "latex"])
def test_forms_of_a_table(form: str, snapshot: SnapshotAssertion) -> None:
    """Exact texts; after a change that is meant, `pytest tests/reporting --snapshot-update` renews them."""
    inductive, free, _ = (board_table(board) for board in boards(RUN, compared()))
    forms = {"markdown": inductive.markdown(), "latex": free.latex("Accuracy: data_free")}
    assert forms[form] == snapshot


def test_csv_has_numbers_and_the_intervals_of_every_task_and_columns_of_seeds() -> None:
    board = boards(RUN, compared())[1]
    rows = list(csv.DictReader(io.StringIO(board_csv(board))))
    assert float(rows[1]["mean"]) == pytest.approx(60)
    assert (rows[1]["verdict"], rows[1]["against"], rows[0]["verdict"]) == ("worse", "expert", "reference")
    assert float(rows[1]["b low"]) == pytest.approx(56)
    assert rows[1]["b examples"] == "100"
    assert rows[0]["sd"] == ""
    first, second = csv.DictReader(io.StringIO(comparisons_csv(compared())))
    assert (first["method"], first["against"], second["worse_on"]) == ("average", "ties", "b")
    assert float(second["difference"]) == pytest.approx(-30)
    # Several seeds have columns of their own.
    drawn = [record(t, "ties", v, access="inductive", shots=5, seed=s) for s, v in ((0, 0.5), (1, 0.7)) for t in TASKS]
    table = board_table(boards(drawn)[0])
    assert table.names[-4:] == ("sd", "worst", "seeds", "extra")
    assert table.texts[0][-4:] == ("14.1", "50.0", "2", "0")


def html(table: Table) -> str:
    """A table as the page shows it."""
    return str(templates().get_template("table.html").module.table_of(table))


def test_html() -> None:
    rows = (("ties", number(84.04, best=True), 2), ("a|b_c", number(None), 1_000))
    names = '<th scope="col">method</th><th scope="col" class="n">mean</th><th scope="col" class="n">n</th>'
    assert html(Table.of("Scores & more", ("method", "mean", "n"), rows)).strip().split("\n") == [
        "<table>",
        "<caption>Scores &amp; more</caption>",
        f"<thead><tr>{names}</tr></thead>",
        "<tbody>",
        '<tr><th scope="row">ties</th><td class="n"><strong>84.0</strong></td><td class="n">2</td></tr>',
        '<tr><th scope="row">a|b_c</th><td class="n"></td><td class="n">1000</td></tr>',
        "</tbody>",
        "</table>",
    ]


def test_html_shows_cut_texts_in_full_and_holds_no_markup_but_ours() -> None:
    table = Table.of("", ("name", "hash"), (("a", Cell("abab", 'blake3:ababab"')),))
    assert '<td class="n"><code title="blake3:ababab&#34;">abab</code></td>' in html(table)
    unseen = "a\u202eb\r\x85"
    cells = ((ALERT + unseen, Cell("<b>", best=True)), (BREAK_OUT, Cell(unseen, "\x1b[2J\ud83d")))
    text = html(Table.of(ALERT + unseen, (ALERT + unseen, BREAK_OUT), cells))
    tags = set(re.findall(r"<(\w+)", text))
    assert tags == {"table", "caption", "thead", "tbody", "tr", "th", "td", "strong", "code"}
    assert all(letter == "\n" or letter.isprintable() for letter in text)
    assert text.count("u202eb") == 4
