"""Files of users in the way of every command that writes: they survive, and the message names them."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest
from tests.berts import contents
from tests.calling import call, refused
from tests.faults.injection import Injector, What
from tests.faults.tiny import TASKS, commands, evaluation
from tests.reporting.making import small_run, write_run

from orthomerge.core.errors import OutputError
from orthomerge.files.run_state import RunState, clear_state
from orthomerge.models.saved import verify_folder

ALL = os.environ.get("CRASH_POINTS") == "all"
MINE, TASK = "years of work", next(iter(TASKS))


PLACES = [
    ("merge", "out/notes.txt"), ("merge", "out/TASK/notes.txt"), ("export", "out/notes.txt"),
    ("evaluate", "out/records.jsonl"), ("evaluate", "out/notes.json"),
    ("report", "out.html"), ("report", "out_files/notes.txt"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "place"), PLACES)
def test_what_a_user_put_there_stays(command: str, place: str, experts: Path, merged: Path, tmp_path: Path) -> None:
    out, mine = tmp_path / "out", tmp_path / place.replace("TASK", TASK)
    run = write_run(tmp_path / "run", small_run())
    words: list[str] = {
        "merge": [*commands(experts, merged)["merge"], "--out", str(out), "--force"],
        "export": ["export", str(merged), "--task", TASK, "--out", str(out), "--force"],
        "evaluate": [*evaluation(experts, merged), "--out", str(out), "--expert", f"{TASK}={experts / TASK}"],
        "report": ["report", str(run), "--out", str(tmp_path / "out.html")],
    }[command]
    if command in ("merge", "export"):  # an output of ours, to which the user has added something
        call(*words)
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text(MINE)
    before = contents(tmp_path)
    message = refused(*words, code=5)
    assert mine.name in message or str(mine.parent) in message
    assert contents(tmp_path) == before


def test_nothing_is_written_into_a_model(experts: Path, merged: Path, tmp_path: Path) -> None:
    merged = shutil.copytree(merged, tmp_path / "merged")
    run = write_run(tmp_path / "run", small_run())
    report = ["report", str(run), "--out", str(merged / "x.html")]
    for words in ([*evaluation(experts, merged), "--out", str(merged)], report):
        assert "is a model that orthomerge wrote (it has orthomerge.json)" in refused(*words, code=5)
    assert verify_folder(merged) == []


def test_the_state_of_a_run_goes_only_where_it_is_ours(tmp_path: Path) -> None:
    mine = tmp_path / ".out.fitting" / "state.pt"
    mine.parent.mkdir()
    mine.write_text(MINE)
    state = RunState(mine.parent, "x")
    clear_state(state.folder)
    for act in (state.read, lambda: state.write({})):
        with pytest.raises(
            OutputError, match=r"\.out\.fitting is needed for the state of the run, but has other files"
        ):
            act()
    assert mine.read_text() == MINE
    ours = RunState(tmp_path / ".to.fitting", "x")
    ours.write({"step": 1})
    RunState(ours.folder, "x", part="mask").write({"step": 2})
    assert ours.read() == {"fingerprint": "x", "step": 1}
    clear_state(ours.folder)
    assert not ours.folder.exists()


@pytest.mark.parametrize("what", ["torn", "fail"])
def test_a_report_that_is_killed_or_fails(what: What, injected: Injector, tmp_path: Path) -> None:
    """Over an older report, neither page nor folder is ever gone; the same command then makes both and clears up."""
    root, older = injected.reset(), tmp_path / "older"
    runs = (write_run(tmp_path / name, small_run(tasks)) for name, tasks in (("a", ("a",)), ("b", ("b", "c"))))
    first, again = (["report", str(run), "--out", str(root / "out.html")] for run in runs)
    assert injected.run(first).code == 0
    shutil.copytree(root, older)
    calls = injected.run(again).calls
    before, after = contents(older), contents(root)
    assert after != before
    many = len(calls)
    points = [*range(1, many, 15), *range(many - 10, many + 1)] if ALL else [many // 2, many - 2, many - 1, many]
    for k in points:
        shutil.rmtree(root)
        shutil.copytree(older, root)
        ran, at = injected.run(again, what=what, k=k, code=errno.ENOSPC), (k, calls[k - 1])
        assert ran.code in ((0, -signal.SIGKILL) if what == "torn" else (0, 5)), (at, ran.err)
        now = {name: data for name, data in contents(root).items() if not name.startswith(".")}
        for deep in (False, True):  # the page, then the folder
            old, new, here = (
                {name: data for name, data in each.items() if ("/" in name) == deep} for each in (before, after, now)
            )
            assert here in (old, new), at
        assert injected.run(again).code == 0
        assert contents(root) == after, at
