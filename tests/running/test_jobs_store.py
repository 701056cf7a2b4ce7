"""Jobs on disk: keys, plans, outputs that are whole or not there, leases."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.running.job_making import plan_nothing

from orthomerge.errors import CheckpointError, OrthomergeError, OutputError
from orthomerge.running.jobs.doing import attempt, do
from orthomerge.running.jobs.job import make_job
from orthomerge.running.jobs.leases import holder, leased
from orthomerge.running.jobs.plan import Plan, read_plan, write_plan
from orthomerge.running.jobs.store import Store

KEY = "a" * 64


def fill(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text(text)

    return write


def test_a_key_is_what_a_job_depends_on() -> None:
    one = make_job("nothing", {"a": 1, "b": 2}, inputs="x")
    assert one.key == make_job("nothing", {"b": 2, "a": 1}, inputs="x").key
    others = [
        make_job("expert", {"a": 1, "b": 2}, inputs="x"),
        make_job("nothing", {"a": 1}, inputs="x"),
        make_job("nothing", {"a": 1, "b": 2}, inputs="y"),
        make_job("nothing", {"a": 1, "b": 2}, inputs="x", needs=[one]),
    ]
    assert len({one.key, *(other.key for other in others)}) == 5


def test_the_version_is_part_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = make_job("nothing").key
    monkeypatch.setattr("orthomerge.running.jobs.job.VERSION", "9.9.9")
    assert make_job("nothing").key != before


def test_a_plan_is_read_back(tmp_path: Path) -> None:
    jobs = plan_nothing(tmp_path)
    assert read_plan(tmp_path).jobs == tuple(jobs)
    assert read_plan(tmp_path) is read_plan(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "0.0.1"}, r"version \(1, '0.0.1'\).*plan again with `orthomerge run RECIPE --run .* --plan-only`"),
        ({"format": 2}, "format and version"),
        ({"surprise": 1}, "unknown option 'surprise'.*plan again"),
        ({"jobs": [{"key": "b", "kind": "nothing", "needs": ["a"]}]}, "needs a, which is not before it"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    plan_nothing(tmp_path)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=message):
        read_plan(tmp_path)


def test_no_plan(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no plan .*--plan-only"):
        read_plan(tmp_path)
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*plan again"):
        read_plan(tmp_path)


def test_an_unknown_kind(tmp_path: Path) -> None:
    job = make_job("nothink")
    write_plan(tmp_path, Plan((job,)))
    with pytest.raises(CheckpointError, match="unknown kind 'nothink'; did you mean 'nothing'"):
        do(tmp_path, job.key)


def test_a_job_of_an_older_plan(tmp_path: Path) -> None:
    plan_nothing(tmp_path)
    with pytest.raises(OrthomergeError, match="planned anew; start the workers again"):
        do(tmp_path, KEY)


def test_inputs_that_changed_since_they_were_planned(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not the file that this run was planned with; bring it back, or plan"):
        Plan().check_inputs([Path(__file__)])
    with pytest.raises(CheckpointError, match="it was there when planned"):
        Plan().check_inputs([tmp_path / "gone"])


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.found(KEY) is None
    done = store.make(KEY, "nothing", fill("one"))
    assert store.found(KEY) == done
    assert (done.host, done.pid, list(done.files)) == (socket.gethostname(), os.getpid(), ["inner/file"])
    assert done.memory > 1 << 20
    assert sorted(path.name for path in store.folder.iterdir()) == [KEY, f"{KEY}.done"]


def test_the_first_of_two_stays(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = store.make(KEY, "nothing", fill("one"))
    inode = (store.place(KEY) / "inner/file").stat().st_ino
    assert store.make(KEY, "nothing", fill("other")) == first
    assert (store.place(KEY) / "inner/file").stat().st_ino == inode
    assert len(list(store.folder.iterdir())) == 2


def test_a_worker_that_was_killed_before_it_could_say_so(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.make(KEY, "nothing", fill("one"))
    inode = (store.place(KEY) / "inner/file").stat().st_ino
    (store.folder / f"{KEY}.done").unlink()
    assert store.found(KEY) is None
    assert store.make(KEY, "nothing", fill("one")) == store.found(KEY)
    assert (store.place(KEY) / "inner/file").stat().st_ino == inode


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "done-cut", "done-empty", "done-other"])
def test_what_is_damaged_is_done_again(tmp_path: Path, damage: str) -> None:
    job = plan_nothing(tmp_path, 1)[0]
    do(tmp_path, job.key)
    store = Store(tmp_path)
    file, mark = store.place(job.key) / "nothing", store.folder / f"{job.key}.done"
    sound = file.read_bytes()
    if damage == "flip":
        file.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    elif damage == "cut":
        file.write_bytes(sound[:-1])
    elif damage == "gone":
        file.unlink()
    else:
        text = mark.read_text()
        mark.write_text({"done-cut": text[:-9], "done-empty": "", "done-other": text.replace(job.key, KEY)}[damage])
    assert store.found(job.key) is None
    assert do(tmp_path, job.key) == store.found(job.key)
    assert file.read_bytes() == sound
    assert len(list(store.folder.iterdir())) == 2


def test_contents_count_and_not_times(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.make(KEY, "nothing", fill("one"))
    os.utime(store.place(KEY) / "inner/file")
    assert store.found(KEY) is not None


def test_hard_links_to_what_is_needed_are_not_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = Store(tmp_path), "b" * 64
    before = store.make(KEY, "nothing", fill("one"))
    monkeypatch.setattr("orthomerge.running.jobs.store._sha256", lambda path: pytest.fail("read again"))

    def link(folder: Path) -> None:
        (folder / "link").hardlink_to(store.place(KEY) / "inner/file")

    done = store.make(other, "nothing", link, needs=[KEY])
    assert done.files["link"].sha256 == before.files["inner/file"].sha256


def test_a_job_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        fill("half")(folder)
        raise CheckpointError("broken")

    store = Store(tmp_path)
    with pytest.raises(CheckpointError, match="broken"):
        store.make(KEY, "nothing", fail)
    assert list(store.folder.iterdir()) == []


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OutputError, match="No space left on device; make room, and go on"):
        Store(tmp_path).make(KEY, "nothing", fail)


def test_what_no_plan_wants_is_removed(tmp_path: Path) -> None:
    store, other = Store(tmp_path), "b" * 64
    for key in (KEY, other):
        store.make(key, "nothing", fill(key))
    us = f"{socket.gethostname()}"
    for name in (f"{KEY}.{us}-999999999-ab.tmp", f"{KEY}.{us}-{os.getpid()}-ab.tmp", f"{KEY}.elsewhere-1-ab.tmp"):
        (store.folder / name).mkdir()
    (store.folder / "mine.txt").touch()
    store.keep([KEY])
    left = {path.name for path in store.folder.iterdir()}
    busy = {f"{KEY}.{us}-{os.getpid()}-ab.tmp", f"{KEY}.elsewhere-1-ab.tmp"}
    assert left == {KEY, f"{KEY}.done", "mine.txt"} | busy


def test_two_workers_on_one_job_do_no_harm(tmp_path: Path) -> None:
    store, gate = Store(tmp_path), threading.Barrier(8)
    made = []

    def work() -> None:
        def slowly(folder: Path) -> None:
            fill("same")(folder)
            gate.wait(10)

        made.append(store.make(KEY, "nothing", slowly))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    found = store.found(KEY)
    assert found is not None
    assert {tuple(row.sha256 for row in done.files.values()) for done in made} == {
        tuple(row.sha256 for row in found.files.values())
    }
    assert sorted(path.name for path in store.folder.iterdir()) == [KEY, f"{KEY}.done"]


def test_a_lease_keeps_others_away_while_its_owner_lives(tmp_path: Path) -> None:
    with leased(tmp_path, KEY) as ours:
        assert ours
        assert holder(tmp_path, KEY) == f"process {os.getpid()} on {socket.gethostname()}"
        with leased(tmp_path, KEY) as theirs:
            assert not theirs
    assert list(tmp_path.iterdir()) == []


def test_a_lease_that_is_not_touched_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / f"{KEY}.lease"
    path.write_text(json.dumps(["elsewhere", 1]))
    with leased(tmp_path, KEY, expiry=30) as ours:
        assert not ours
    os.utime(path, (time.time() - 31,) * 2)
    assert holder(tmp_path, KEY) is None
    with leased(tmp_path, KEY, expiry=30) as ours:
        assert ours


def test_a_lease_of_a_dead_process_of_this_machine_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / f"{KEY}.lease").write_text(json.dumps([socket.gethostname(), 999_999_999]))
    with leased(tmp_path, KEY) as ours:
        assert ours


def test_a_lease_is_touched(tmp_path: Path) -> None:
    with leased(tmp_path, KEY, expiry=0.3):
        path = tmp_path / f"{KEY}.lease"
        before = path.stat().st_mtime_ns
        time.sleep(0.5)
        assert path.stat().st_mtime_ns > before
        assert holder(tmp_path, KEY, expiry=0.3) is not None


def test_a_job_that_somebody_is_at_is_waited_for(tmp_path: Path) -> None:
    job = plan_nothing(tmp_path, 1)[0]
    path = tmp_path / "jobs" / f"{job.key}.lease"
    path.parent.mkdir()
    path.write_text(json.dumps(["elsewhere", 1]))
    assert attempt(tmp_path, job.key) is None
    threading.Timer(0.5, path.unlink).start()
    assert do(tmp_path, job.key).key == job.key
