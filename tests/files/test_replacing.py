"""A replaced file is the old one or the new one; one module removes files, and only what it can prove to be ours."""

from __future__ import annotations

import ast
import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from orthomerge.core.errors import OutputError
from orthomerge.files.replacing import clear_partials, os_errors, remove_folder, remove_listed, replace_file, replacing

TOKEN = "0123456789abcdef"
SOURCE = Path(__file__).parents[2] / "src" / "orthomerge"
REMOVING = {"rmtree", "unlink", "rmdir", "remove", "removedirs"}
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "files" / "replacing.py")


def test_a_file_is_replaced_and_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, sync = [], os.fsync

    def record(handle: int) -> None:
        synced.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        sync(handle)

    monkeypatch.setattr(os, "fsync", record)
    path = tmp_path / "records[1].jsonl"
    for data in (b"old", b"new"):
        replace_file(path, data)
        assert path.read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == [path.name]
    assert synced[1::2] == [tmp_path.name] * 2
    assert synced[0].startswith(".records[1].jsonl.")


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old")

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OutputError, match=r"cannot write .*file: No space left on device; make room"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_goes_and_what_others_write_stays(tmp_path: Path) -> None:
    path, precious = tmp_path / "file", tmp_path / ".file.thesis.partial"
    left, busy = (tmp_path / f".file.{token}.partial" for token in (TOKEN, TOKEN[::-1]))
    left.touch()
    precious.write_text("years of work")
    with busy.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        replace_file(path, b"new")
        assert (left.exists(), busy.exists()) == (False, True)
    clear_partials(tmp_path, "file")
    assert sorted(tmp_path.iterdir()) == [precious, path]


def test_a_file_taken_for_left_that_is_still_being_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, removers = fcntl.flock, list[threading.Timer]()

    def behind_another(file: object, mode: int) -> None:
        if not removers:
            (path,) = tmp_path.iterdir()
            handle = os.open(path, os.O_RDWR)
            original(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

            def remove() -> None:
                path.unlink()
                os.close(handle)

            removers.append(threading.Timer(0.05, remove))
            removers[0].start()
        original(file, mode)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", behind_another)
    with replacing(tmp_path / "file") as file:
        file.write(b"new")
        removers[0].join()
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"new")]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: object, mode: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    (tmp_path / f".file.{TOKEN}.partial").touch()
    replace_file(tmp_path / "file", b"new")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".file.{TOKEN}.partial", "file"]


def test_errors_of_libraries_that_write_by_themselves(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"\[Errno 28\] No space left on device"), os_errors():
        raise ValueError("I/O error: No space left on device (os error 28)")
    with pytest.raises(ValueError, match="something else"), os_errors():
        raise ValueError("something else")


def removals(tree: ast.AST) -> Iterator[str]:
    """Attributes and imports that remove something on disk; `remove` only of `os`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in REMOVING:
            of = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr not in ("remove", "removedirs") or of == "os":
                yield f"{of}.{node.attr}, line {node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil"):
            yield from (f"{each.name}, line {node.lineno}" for each in node.names if each.name in REMOVING)


def test_nothing_else_removes_files() -> None:
    calls = {path.relative_to(SOURCE).as_posix(): list(removals(ast.parse(path.read_text()))) for path in MODULES}
    assert {name: each for name, each in calls.items() if each} == {}
    assert len(list(removals(ast.parse((SOURCE / "files" / "replacing.py").read_text())))) == 3  # the test sees them


def test_a_folder_without_a_proof_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "marker").touch()
    folder = tmp_path / "a"
    remove_folder(folder, proof="marker")
    assert (folder / "b").is_dir()
    (folder / "marker").symlink_to(tmp_path / "marker")
    remove_folder(folder, proof="marker")
    assert (folder / "b").is_dir()
    (folder / "marker").unlink()
    (folder / "marker").touch()
    remove_folder(folder, proof="marker")
    assert not folder.exists()
    (tmp_path / "empty").mkdir()
    remove_folder(tmp_path / "empty", proof="marker")
    assert [path.name for path in tmp_path.iterdir()] == ["marker"]


@pytest.mark.parametrize(
    "name", ["../x/precious", "/etc/hostname", "link/precious", "..", ".", "", "a/../../x/precious"]
)
def test_listed_names_that_lead_elsewhere_are_left_alone(tmp_path: Path, name: str) -> None:
    precious = tmp_path / "x" / "precious"
    precious.parent.mkdir()
    precious.write_text("years of work")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(precious.parent)
    remove_listed(folder, [name])
    assert precious.read_text() == "years of work"
    assert (folder / "link").is_symlink()


def test_listed_files_go_and_the_folders_that_are_empty_then(tmp_path: Path) -> None:
    for name in ("a/b/one", "a/two", "c/three"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    remove_listed(tmp_path, ["a/b/one", "c/three", "never"])
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["a", "a/two"]
