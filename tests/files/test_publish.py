"""A result is there whole or not there: whatever fails, whenever it fails, and whoever else is writing."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.injection import memory_folder

from orthomerge.core.errors import OutputError
from orthomerge.files import publish as module
from orthomerge.files import replacing
from orthomerge.files.checkpoint import Spec
from orthomerge.files.documents import write_bytes, write_json
from orthomerge.files.folders import MANIFEST
from orthomerge.files.publish import check_room, check_target, publish
from orthomerge.files.safetensors import write_shards

WORK = ".out.orthomerge-0123abc_"  # a working folder, as a killed run leaves it
SPECS = {"a": Spec((4,), "F32"), "b": Spec((2,), "F32")}
FILES = [
    *("encoder/model-00001-of-00002.safetensors", "encoder/model-00002-of-00002.safetensors"),
    *("encoder/model.safetensors.index.json", "orthomerge.json", "tokenizer.json"),
]


def work(out: Path, number: int, *, force: bool = False) -> None:
    """A small output with everything that a real one has."""
    with publish(out, force=force) as folder:
        (folder / "encoder").mkdir()
        blocks = [("a", torch.full((4,), float(number))), ("b", torch.full((2,), float(number)))]
        write_shards(folder / "encoder", SPECS, blocks, max_bytes=16)
        shutil.copyfile(__file__, folder / "tokenizer.json")
        write_manifest(folder, number=number)


def refused(out: Path, match: str, *, force: bool = False) -> None:
    with pytest.raises(OutputError, match=match):
        work(out, 2, force=force)


def write_manifest(folder: Path, **about: int) -> None:
    """A manifest that lists all other files."""
    files = {path.relative_to(folder).as_posix(): None for path in folder.rglob("*") if not path.is_dir()}
    write_json(folder / MANIFEST, {"format": 1, **about, "files": files})


def state(out: Path) -> int | None:
    """The number of the output that is there; None if there is none. It must be whole."""
    if not os.path.lexists(out):
        return None
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()) == FILES
    number: int = json.loads((out / MANIFEST).read_text())["number"]
    first, second = (out / name for name in FILES[:2])
    assert first.read_bytes().endswith(bytes(torch.full((4,), float(number)).view(torch.uint8).numpy()))
    assert second.read_bytes().endswith(bytes(torch.full((2,), float(number)).view(torch.uint8).numpy()))
    return number


def fail_within(out: Path, error: BaseException) -> None:
    """Raise an error while an output is half written."""
    with publish(out) as folder:
        (folder / "x").write_text("half")
        raise error


def beside(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir() if path != out)


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    out = tmp_path / "Ein neuer Ordner" / "größe" / "out"
    with publish(out) as folder:
        assert folder.is_dir()
        assert not out.exists()
        assert not any(folder.iterdir())
        (folder / "sub").mkdir()
        write_bytes(folder / "sub" / "x", b"content")
    assert (out / "sub" / "x").read_bytes() == b"content"
    assert (beside(out), [path.name for path in out.iterdir()]) == ([], ["sub"])


def test_a_path_may_be_relative_or_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    work(Path("one"), 1)
    work(Path("~/two"), 2)
    with publish(Path("three")) as folder:
        monkeypatch.chdir("/")  # whatever happens meanwhile
        write_manifest(folder)
    assert (state(tmp_path / "one"), state(tmp_path / "two")) == (1, 2)
    assert (tmp_path / "three" / MANIFEST).exists()


PASSED_ON = (ValueError("x"), KeyboardInterrupt(), GeneratorExit())
OF_THE_DISK = (OSError(errno.ENOSPC, "No space left"), shutil.SameFileError("the two are the same"))


@pytest.mark.parametrize("error", [*PASSED_ON, *OF_THE_DISK])
def test_a_failure_leaves_nothing_and_is_told(tmp_path: Path, error: BaseException) -> None:
    told = f"cannot write .*out: {getattr(error, 'strerror', None) or error}; nothing was left behind"
    with pytest.raises(type(error)) if error in PASSED_ON else pytest.raises(OutputError, match=told):
        fail_within(tmp_path / "out", error)
    assert list(tmp_path.iterdir()) == []


def test_force_replaces_what_we_wrote_and_an_empty_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    work(out, 1)
    (out / "orthomerge.local.json").write_text("{}")  # ours, though no manifest lists it
    work(out, 2, force=True)
    assert (state(out), beside(out)) == (2, [])
    (tmp_path / "empty").mkdir()
    work(tmp_path / "empty", 3, force=True)
    assert state(tmp_path / "empty") == 3


def _foreign_folder(out: Path) -> None:
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")


def link_to_another(out: Path) -> None:
    work(out.parent / "elsewhere", 1)
    out.symlink_to(out.parent / "elsewhere")


def unlisted(name: str) -> Callable[[Path], object]:
    """An output of ours with one name more."""

    def prepare(out: Path) -> None:
        work(out, 1)
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("link"):
            (out / name).symlink_to(out.parent)
        elif name.endswith("/"):
            (out / name).mkdir()
        else:
            (out / name).write_text("years of work")

    return prepare


def marker(text: str) -> Callable[[Path], object]:
    def prepare(out: Path) -> None:
        out.mkdir()
        (out / MANIFEST).write_text(text)

    return prepare


def linked_marker(out: Path) -> None:
    work(out.parent / "elsewhere", 1)
    out.mkdir()
    (out / MANIFEST).symlink_to(out.parent / "elsewhere" / MANIFEST)


NO_MARKER = r"out was not written by orthomerge \(it has no orthomerge.json\), so it is not replaced; move it"
BAD_MARKER = r"out was not written by orthomerge \(its orthomerge.json has no valid 'format' or 'files'"
NAMES = ("notes.txt", "heads/topic/thesis.tex", "encoder/link", "empty/folder/")
MARKERS = ("[]", "{", '{"format": 1}', '{"format": true, "files": {}}', '{"format": 1, "files": [1]}')
OTHERS: list[tuple[Callable[[Path], object], str]] = [
    (_foreign_folder, NO_MARKER),
    (lambda out: out.write_text("years of work"), NO_MARKER),
    (link_to_another, NO_MARKER),
    (linked_marker, BAD_MARKER),
    *((marker(text), BAD_MARKER) for text in MARKERS),
    *((unlisted(name), f"out holds '{name}', which orthomerge did not write, so it is not replaced") for name in NAMES),
]


@pytest.mark.parametrize(("prepare", "message"), OTHERS)
def test_force_replaces_only_what_a_marker_lists(
    tmp_path: Path, prepare: Callable[[Path], object], message: str
) -> None:
    prepare(tmp_path / "out")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    for force, match in ((False, "out exists already; give --force to replace it"), (True, message)):
        refused(tmp_path / "out", match, force=force)
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_what_appears_in_the_target_meanwhile_is_not_touched(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def race(*, force: bool) -> None:
        with publish(out, force=force) as folder:
            write_manifest(folder)
            _foreign_folder(out)

    with pytest.raises(OutputError, match="out exists already; give --force"):
        race(force=False)
    shutil.rmtree(out)
    with pytest.raises(OutputError, match="out was not written by orthomerge"):
        race(force=True)
    assert ([path.name for path in out.iterdir()], beside(out)) == (["thesis.tex"], [])


def test_other_markers_of_ownership_and_a_target_beside_an_input(tmp_path: Path) -> None:
    work(tmp_path / "out", 1)
    with pytest.raises(OutputError, match=r"it has no other.json"):
        check_target(tmp_path / "out", force=True, marker="other.json")
    (tmp_path / "out" / MANIFEST).rename(tmp_path / "out" / "other.json")
    check_target(tmp_path / "out", force=True, marker="other.json")
    (tmp_path / "in").mkdir()
    for out in ("in2", "other/in"):
        check_target(tmp_path / out, inputs=iter([tmp_path / "in", tmp_path / "nowhere"]))


@pytest.mark.parametrize(
    ("out", "source"),
    [
        ("in", "in"),
        ("in/out", "in"),
        ("in/../in/out", "in"),
        ("link/out", "in"),
        ("in/out", "link"),
        (".", "in"),
        ("x", "x/in/file"),
        ("in/file", "in/file"),
        ("out", f"{WORK}/new"),  # what a killed run left is cleared away
    ],
)
def test_a_target_that_overlaps_an_input(tmp_path: Path, out: str, source: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "file").write_text("")
    (tmp_path / "link").symlink_to("in")
    (tmp_path / WORK / "new" / "encoder").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    for force in (False, True):
        with (
            pytest.raises(OutputError, match=r"the output .* overlaps the input .*; choose another place"),
            publish(tmp_path / out, force=force, inputs=[tmp_path / source]),
        ):
            pass
    assert sorted(tmp_path.rglob("*")) == before


def test_targets_that_no_folder_can_be_or_that_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    for out, match in (
        (tmp_path / "file" / "out", r"cannot write to .*file"),
        (tmp_path / ("x" * 300), "cannot write to .*: File name too long"),
        (tmp_path / "a\0b", "null byte"),
        (Path("~nobody-of-this-name/out"), "cannot write to ~nobody.*home directory"),
        (tmp_path / "loop" / "out", r"cannot write to .*loop"),
        (Path("/"), "/ exists already"),
    ):
        refused(out, match)
    refused(Path("/"), "/ was not written by orthomerge", force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop"]

    def fail(path: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(OutputError, match=r"cannot look into .*out: Permission denied; choose another place"):
        check_target(tmp_path / "out", force=True)


def test_too_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    match = r"has 1.00 GB free, but the output needs 2.02 GB; make room, or write elsewhere"
    with pytest.raises(OutputError, match=match), publish(tmp_path / "out", need=2 * 10**9):
        pass
    with pytest.raises(OutputError, match="GB free"):
        check_room(tmp_path / "not" / "there" / "yet", 10**9)
    check_room(tmp_path, 9 * 10**8)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root, whom no mode stops
    refused(tmp_path / "out", f"{tmp_path} cannot be written to; choose another place, or change its")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("function", "code"), [("shutil.disk_usage", errno.ESTALE), ("fcntl.flock", errno.ENOLCK)])
def test_a_disk_that_does_not_answer_or_has_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, code: int
) -> None:
    def fail(*arguments: object) -> Any:
        raise OSError(code, os.strerror(code))

    handles = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(function, fail)
    refused(tmp_path / "out", f"cannot write to {tmp_path}: {os.strerror(code)}")
    assert len(list(Path("/proc/self/fd").iterdir())) == handles


def test_a_lock_that_is_taken_away_is_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = fcntl.flock, []

    def late(handle: int, mode: int) -> None:
        calls.append(handle)
        if len(calls) < 3:  # as the other run does when it ends in between
            (tmp_path / ".out.orthomerge-lock").unlink()
        original(handle, mode)

    monkeypatch.setattr(fcntl, "flock", late)
    work(tmp_path / "out", 1)
    assert (state(tmp_path / "out"), len(calls)) == (1, 4)  # the last of them before it is taken away
    monkeypatch.setattr(fcntl, "flock", lambda handle, mode: (tmp_path / ".new.orthomerge-lock").unlink())
    refused(tmp_path / "new", r"cannot lock .*\.new\.orthomerge-lock, as other runs write")


def test_two_runs_into_one_target(tmp_path: Path) -> None:
    out = tmp_path / "out"
    message = r"another run is writing to the same output, .*out; wait for it"
    with publish(out) as folder:
        refused(out, message)
        (tmp_path / "link").symlink_to(tmp_path)
        refused(tmp_path / "link" / "out", message)
        work(tmp_path / "other", 3)
        write_manifest(folder)
    assert (out / MANIFEST).exists()
    assert beside(out) == ["link", "other"]


def killed(out: Path, *, old: int | None = None) -> Path:
    """The working folder of a run that was killed."""
    working = out.parent / WORK
    (working / "new" / "encoder" / "deep").mkdir(parents=True)
    (working / ".orthomerge-working").touch()
    (working / "new" / "encoder" / "model.safetensors").write_bytes(bytes(100))
    (working / "new" / "encoder" / "deep").chmod(0o500)
    if old is not None:
        work(working / "old", old)
    return working


def test_what_a_killed_run_left_is_cleared_away(tmp_path: Path) -> None:
    out, precious = tmp_path / "out", tmp_path / "precious"
    _foreign_folder(precious)
    (killed(out) / "new" / "link").symlink_to(precious)
    (tmp_path / ".out.orthomerge-lock").touch()
    (tmp_path / ".out.orthomerge-empty123").mkdir()  # killed before its marker was there
    work(out, 1)
    assert (state(out), beside(out)) == (1, ["precious"])
    assert (precious / "thesis.tex").exists()


@pytest.mark.parametrize("name", [".out.partial", ".out.old", ".out.fitting", ".out.orthomerge-", WORK, "out.partial"])
def test_folders_of_others_beside_an_output_stay(tmp_path: Path, name: str) -> None:
    """Whatever they are called; even a name like ours needs the marker."""
    out, precious = tmp_path / "out", tmp_path / name
    _foreign_folder(precious)
    for number in (1, 2):
        work(out, number, force=number == 2)
        assert (state(out), beside(out)) == (number, [name])
    assert (precious / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("name", [".out.lock", ".out.json.partial", ".out.orthomerge-lock"])
@pytest.mark.parametrize("link", [False, True])
def test_files_of_others_beside_an_output_stay(tmp_path: Path, name: str, link: bool) -> None:
    precious = tmp_path / ("thesis.tex" if link else name)
    precious.write_text("years of work")
    if link:
        (tmp_path / name).symlink_to(precious)
    taken = pytest.raises(OutputError, match=f"{tmp_path / name} is not a lock of orthomerge; move it away")
    with taken if name.endswith("-lock") else nullcontext():
        work(tmp_path / "out", 1)
    assert (tmp_path / "out").exists() != name.endswith("-lock")
    assert (tmp_path / name).is_symlink() == link
    assert precious.read_text() == "years of work"


@pytest.mark.parametrize("swap", [False, True])
def test_a_file_appearing_in_the_last_moment_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swap: bool) -> None:
    out, original = tmp_path / "out", module._commit
    work(out, 1)

    def late(*arguments: Any) -> None:
        (out / "notes.txt").write_text("years of work")
        original(*arguments)

    monkeypatch.setattr(module, "_commit", late)
    if not swap:
        monkeypatch.setattr(module, "_exchange", lambda *arguments: False)
    refused(out, r"out holds 'notes.txt', which orthomerge did not write", force=True)
    assert (out / "notes.txt").read_text() == "years of work"
    (out / "notes.txt").unlink()
    assert (state(out), beside(out)) == (1, [])


def test_a_link_in_the_place_of_a_working_folder_stays(tmp_path: Path) -> None:
    precious = killed(tmp_path / "far" / "out")
    (tmp_path / WORK).symlink_to(precious)
    work(tmp_path / "out", 1)
    assert (tmp_path / WORK).is_symlink()
    assert (precious / "new" / "encoder" / "model.safetensors").exists()


def test_a_swap_that_was_killed_between_two_renames_is_undone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed(out, old=1)  # where the kernel cannot swap, the old one is moved away for a moment
    refused(out, "out exists already")
    assert (state(out), beside(out)) == (1, [])
    killed(out, old=1)
    work(out, 2, force=True)
    assert (state(out), beside(out)) == (2, [])


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.EROFS])
def test_where_the_kernel_cannot_swap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    class Library:
        renameat2 = staticmethod(lambda *arguments: -1)

    monkeypatch.setattr(ctypes, "CDLL", lambda *arguments, **options: Library())
    monkeypatch.setattr(ctypes, "get_errno", lambda: code)
    out = tmp_path / "out"
    work(out, 1)
    if code == errno.EROFS:
        refused(out, r"cannot write .*out: Read-only file system; nothing was left behind", force=True)
    else:
        work(out, 2, force=True)
    assert (state(out), beside(out)) == (1 if code == errno.EROFS else 2, [])


def test_files_copied_by_others_are_synced_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, sync = set(), os.fsync

    def record(handle: int) -> None:
        synced.add(Path(f"/proc/self/fd/{handle}").readlink().name)
        sync(handle)

    monkeypatch.setattr(os, "fsync", record)
    work(tmp_path / "out", 1)
    assert {Path(name).name for name in FILES} | {"encoder", "new", tmp_path.name} <= synced


def test_a_folder_above_that_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = replacing.sync

    def fail(path: Path) -> None:
        if path == tmp_path:
            raise OSError(errno.EIO, "Input/output error")
        original(path)

    monkeypatch.setattr(module, "sync", fail)
    match = r"out is complete, but .* could not be synced \(Input/output error\); check the"
    refused(tmp_path / "out", match)
    assert (state(tmp_path / "out"), beside(tmp_path / "out")) == (2, [])


# A failure at every single step
STEPS = ("write", "fsync", "rename", "replace", "open", "mkdir", "unlink", "rmdir")


@contextmanager
def failing(number: int, fail: Callable[[], None], *, swap: bool) -> Iterator[list[str]]:
    """Call `fail` in place of the `number`-th of the steps that touch the disk."""
    passed: list[str] = []
    originals = {name: getattr(os, name) for name in STEPS}
    exchange = module._exchange

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            passed.append(name)
            if len(passed) == number:
                fail()
            return original(*arguments, **options)

        return step

    for name, original in originals.items():
        setattr(os, name, counted(name, original))
    module._exchange = counted("exchange", exchange if swap else lambda *arguments: False)
    try:
        yield passed
    finally:
        for name, original in originals.items():
            setattr(os, name, original)
        module._exchange = exchange


def _full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder where thousands of syncs cost nothing."""
    with memory_folder() as folder:
        yield folder


CASES = [("new", True), ("force", True), ("force", False)]


def at_each_step(out: Path, old: int | None, attempt: Callable[[int], bool]) -> None:
    """Call `attempt` with the number of every step in turn, until it says that there is no such step."""
    for number in range(1, 200):
        if old is not None:
            work(out, old, force=True)
        if not attempt(number):
            assert number > 25
            return
        # The same command again does it, and leaves nothing else.
        work(out, 2, force=old is not None or state(out) is not None)
        assert (state(out), beside(out)) == (2, []), number
        shutil.rmtree(out)


@pytest.mark.parametrize(("kind", "swap"), CASES)
def test_an_error_at_any_step_leaves_the_old_or_nothing(in_memory: Path, kind: str, swap: bool) -> None:
    out, old = in_memory / "out", 1 if kind == "force" else None

    def attempt(number: int) -> bool:
        message = ""
        with failing(number, _full_disk, swap=swap) as passed:
            try:
                work(out, 2, force=old is not None)
            except OutputError as error:
                message = str(error)
        refused = message and "is complete" not in message
        assert state(out) == (old if refused else 2), (number, passed)
        # Only where clearing away itself fails, something hidden is left for the next run.
        cleaning = len(passed) >= number and passed[number - 1] in ("unlink", "rmdir")
        assert not refused or cleaning or beside(out) == [], (number, passed)
        return len(passed) >= number

    at_each_step(out, old, attempt)


PROGRAM = """
import sys
from pathlib import Path
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("test_publish", sys.argv[1])
tests = module_from_spec(spec)
spec.loader.exec_module(tests)
tests.crash_everywhere(Path(sys.argv[2]))
"""


def crash_everywhere(folder: Path) -> None:
    """Run in a process of its own: children are killed at every step, one after another."""
    for kind, swap in CASES:
        out, old = folder / kind / "out", 1 if kind == "force" else None

        def attempt(number: int, out: Path = out, old: int | None = old, swap: bool = swap) -> bool:
            child = os.fork()
            if child == 0:
                with failing(number, lambda: os._exit(9), swap=swap):
                    work(out, 2, force=old is not None)
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code in (0, 9), (number, code)
            now = state(out)
            assert now in (old, 2) or (not swap and now is None), (number, now)
            assert code == 9 or (now == 2 and beside(out) == []), number
            return code == 9

        at_each_step(out, old, attempt)
        print(kind, swap)


def test_a_crash_at_any_step_leaves_the_old_or_nothing_or_all(in_memory: Path) -> None:
    words = [sys.executable, "-c", PROGRAM, __file__, str(in_memory)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("force") == 2
