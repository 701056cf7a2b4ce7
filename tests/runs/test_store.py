"""The store believes what this machine wrote and nothing else, and two commands make nothing twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orthomerge.core.errors import OutputError
from orthomerge.runs.store import ENTRY, Store

KEY, OTHER = "a" * 64, "b" * 64
MAKE = """
import os, sys, time
from pathlib import Path
from orthomerge.runs.store import Store

def fill(place):
    with open(sys.argv[2], "a") as log:
        log.write("made\\n")
    print("filling", flush=True)
    time.sleep(float(sys.argv[3]))
    (place / "value").write_text("42")

Store(Path(sys.argv[1])).make("a" * 64, "x", fill)
"""


def fill(place: Path) -> None:
    (place / "folder").mkdir()
    (place / "folder/value").write_text("42")
    (place / "link").symlink_to("folder/value")


def refuse(place: Path) -> None:
    raise AssertionError("it is made again")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    store.make(KEY, "x", fill)
    return Store(tmp_path / "store")  # which has verified nothing yet


def test_what_is_there_is_not_made_again(store: Store, tmp_path: Path) -> None:
    entry = store.make(KEY, "x", refuse)
    assert (entry.name, sorted(entry.files)) == ("x", ["content/folder/value", "content/link"])
    assert [entry.key for entry in store.entries()] == [KEY]
    assert (store.content(KEY) / "link").read_text() == "42"
    assert sorted(path.name for path in store.root.iterdir()) == [KEY]  # neither leases nor working folders
    shutil.copytree(store.root, tmp_path / "copy")  # with files for links
    assert Store(tmp_path / "copy").get(KEY) is not None


def rewrite(place: Path, **changes: str) -> None:
    document = json.loads((place / ENTRY).read_text())
    (place / ENTRY).write_text(json.dumps({**document, **changes}))


def changed(place: Path) -> None:
    """Size and time are kept."""
    path = place / "content/folder/value"
    status = path.stat()
    path.write_text("43")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def link_out(path: Path, far: Path) -> None:
    """Move something out of the store and leave a link to it."""
    path.rename(far)
    path.symlink_to(far)


def break_entry(place: Path) -> None:
    (place / ENTRY).write_text('{"format": 1, "files": {}}')
    shutil.rmtree(place / "content")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "another name": lambda place: rewrite(place, name="y"),
    "files and hashes agree, but the seal is of another machine": lambda place: rewrite(place, seal="0" * 64),
    "changed": changed,
    "linked": lambda place: link_out(place / "content/folder/value", place.parents[1] / "far"),
    "removed": lambda place: (place / "content/folder/value").unlink(),
    "broken": break_entry,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_ours_is_made_again(store: Store, damage: str) -> None:
    DAMAGES[damage](store.root / KEY)
    assert store.get(KEY) is None
    assert damage != "broken" or list(store.entries()) == []
    store.make(KEY, "x", fill)
    assert Store(store.root).get(KEY) is not None
    assert damage != "linked" or (store.root.parent / "far").read_text() == "42"


def test_entries_under_another_key_or_of_another_machine(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(store.root / KEY, store.root / OTHER, symlinks=True)
    assert store.get(OTHER) is None
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(store.root.parent / "elsewhere"))
    assert Store(store.root).get(KEY) is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda place: (place / "content/thesis.tex").write_text("years of work"),
         "holds 'content/thesis.tex', which orthomerge did not write, so it is not replaced"),
        (lambda place: (place / ENTRY).unlink(), r"was not written by orthomerge \(it has no entry.json\)"),
        (lambda place: link_out(place / "content", place.parents[1] / "far"),
         "holds 'content', which orthomerge did not write, so it is not replaced"),
        (lambda place: link_out(place, place.parents[1] / "far"), r"was not written by orthomerge \(it has no entry"),
    ],
)  # fmt: skip
def test_what_others_put_there_is_not_removed(store: Store, damage: Callable[[Path], object], message: str) -> None:
    entry = store.get(KEY)
    assert entry is not None
    damage(store.root / KEY)
    again = Store(store.root)
    with pytest.raises(OutputError, match=message):
        again.make(KEY, "x", fill)
    again.remove(entry)
    assert (store.root / KEY).exists()


def test_a_store_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "far")
    with pytest.raises(OutputError, match="store is a link, and nothing is written through links"):
        Store(tmp_path / "store").make(KEY, "x", fill)
    assert list((tmp_path / "far").iterdir()) == []


def start(tmp_path: Path, seconds: float) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", MAKE, str(tmp_path / "store"), str(tmp_path / "log"), str(seconds)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def test_two_commands_make_it_once(tmp_path: Path) -> None:
    both = [start(tmp_path, 0.5) for _ in range(2)]
    assert [process.communicate()[0] for process in both].count("filling\n") == 1
    assert (tmp_path / "log").read_text() == "made\n"
    assert Store(tmp_path / "store").get(KEY) is not None


def test_a_killed_command_is_taken_over_at_once(tmp_path: Path) -> None:
    killed = start(tmp_path, 60)
    assert killed.stdout is not None
    killed.stdout.readline()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    began = time.monotonic()
    Store(tmp_path / "store").make(KEY, "x", fill)
    assert time.monotonic() - began < 10  # and not after the lease has run out
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == [KEY]
