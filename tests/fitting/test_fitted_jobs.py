"""What the benchmark of fitted merges runs: the paper's rows, and any part or method of them apart."""

from __future__ import annotations

from benchmarks.fitted_jobs import PARTS, STARTS, jobs_of


def test_the_tables_have_the_papers_rows() -> None:
    rows = {(job.access, job.row): job for job in jobs_of(["inductive", "transductive"], 3, None)}
    for access in ("inductive", "transductive"):
        for row in ("Fisher", "RegMean", "Concrete TA", "Concrete AdaMerging", "AdaMerging TW", "AdaMerging LW"):
            assert (access, row) in rows
        for start in STARTS:
            for way in ("", " w/ Surgery", " w/ ProbSurgery", " w/ MOMA", " w/ realign"):
                assert rows[access, f"{start}{way}"].start == start


def test_parts_and_methods_done_apart_are_all_of_it() -> None:
    whole = [job.key for job in jobs_of(PARTS, 3, None, analyses=1)]
    by_part = [job.key for part in PARTS for job in jobs_of([part], 3, None, analyses=1)]
    assert sorted(whole) == sorted(by_part)
    methods = ["realign", "align:auto"]
    some = jobs_of(PARTS, 3, None, analyses=1, only=methods)
    others = jobs_of(PARTS, 3, None, analyses=1, without=methods)
    assert {job.what for job in some} == set(methods)
    assert sorted(whole) == sorted(job.key for job in (*some, *others))


def test_seeds_are_repeated_where_they_decide() -> None:
    jobs = jobs_of(PARTS, 3, None, analyses=1)
    seeds = {(job.part, job.row, job.access, job.shots): job.seed + 1 for job in jobs}
    assert seeds["inductive", "ties w/ realign", "inductive", None] == 3
    assert seeds["inductive", "ties", "inductive", None] == 1
    assert seeds["few", "task_arithmetic w/ heads by auto", "inductive", 5.0] == 3
    assert seeds["few", "task_arithmetic w/ realign: mask", "inductive", 20.0] == 3
    assert seeds["ablation", "mask", "transductive", None] == 1
