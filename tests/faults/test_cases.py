"""Every fault of `cases.py` through the command line: error, message, exit code, and nothing left behind."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.aligning import merge_berts, write_tables
from tests.faults.cases import CASES, CORRUPTIONS, Case, Held, Refused, Sound
from tests.faults.corruptions import World

from orthomerge.cli.app import main
from orthomerge.core.errors import OrthomergeError
from orthomerge.models.saved import verify_folder

ROOT = Path(__file__).parents[2]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def sound(berts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    for name in ("base", "two", "three", "five"):
        shutil.copytree(berts / name, folder / name)
    (folder / "data").mkdir()
    write_tables(folder / "data")
    merge_berts(berts, folder / "merged")
    return folder


@pytest.fixture
def world(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> World:
    folder = tmp_path / "world"
    shutil.copytree(sound, folder)
    (folder / "results").mkdir()
    (folder / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path_factory.getbasetemp() / "case-cache"))
    return World(folder, monkeypatch)


def words_for(world: World, row: Refused | Sound) -> list[str]:
    """The command line of a row; BASE=, OUT= and RECIPE among its words stand for parts of it."""
    folder, out, base = world.folder, world.out, "base"
    more = []
    for word in row.more:
        if word.startswith("OUT="):
            out = folder / word[4:] if not word.startswith("OUT=x") else world.out.parent / word[4:]
        elif word.startswith("BASE="):
            base = word[5:]
        else:
            more.append(word)
    if "RECIPE" in more:
        return ["merge", str(folder / "recipe.yaml"), "--out", str(out)]
    if world.words and world.words[0] != "DATA":
        return [*world.words, *more]
    data = world.words[1] if world.words else str(world.table("two"))
    experts = [word for name in world.experts for word in ("--expert", f"{name}={folder / name}")]
    one = ["--expert", f"two={folder / 'two'}", "--data", f"two={data}", "--out", str(out), "--device", "cpu"]
    merge = ["--base", str(folder / base), *experts, "--out", str(out)]
    inputs = [word for name in world.experts for word in ("--data", f"{name}={world.table(name)}")]
    aligner = [] if "--aligner" in more else ["--aligner", "ridge"]
    commands = {
        "merge": ["merge", *merge, "--method", "task_arithmetic", "--quiet"],
        "plan": ["plan", *merge, "--method", "task_arithmetic"],
        "fit": ["merge", *merge, *inputs, "--method", "fisher", "--device", "cpu", "--quiet"],
        "align": ["align", str(folder / "merged"), *one, *aligner, "--quiet"],
        "evaluate": ["evaluate", str(folder / "merged"), *one, "--json"],
        "export": ["export", str(folder / "merged"), "--task", "two", "--to", str(out)],
        "verify": ["verify", str(folder / "merged")],
        "inspect": ["inspect", str(folder / "two")],
    }
    return [*commands[row.meets], *more]


@dataclass(frozen=True)
class Ended:
    code: int
    error: BaseException | None
    message: str


def run(words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Ended:
    """The program's own `main`, in this process."""
    monkeypatch.setattr(sys, "argv", ["orthomerge", *words])
    before = signal.getsignal(signal.SIGTERM)
    capfd.readouterr()
    error: BaseException | None = None
    try:
        main()
    except SystemExit as end:
        code, error = end.code if isinstance(end.code, int) else int(end.code is not None), end.__context__
    else:
        code = 0
    finally:
        signal.signal(signal.SIGTERM, before)
    return Ended(code, error, capfd.readouterr().err)


def state(folder: Path) -> dict[str, Any]:
    """Every path below a folder with what it holds."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        kind = path.lstat().st_mode
        size = path.stat().st_size if path.is_file() else 0
        content = path.read_bytes() if path.is_file() and not path.is_symlink() and size < 1 << 22 else size
        found[str(path.relative_to(folder))] = (kind, content)
    return found


def rows(kind: type[Refused | Sound]) -> Any:
    found = [(case, row) for case in CASES for row in case.rows if isinstance(row, kind)]
    return [pytest.param(case, row, id=f"{case.number:02}-{row.name}".replace(" ", "-")) for case, row in found]


@pytest.mark.parametrize(("case", "row"), rows(Refused))
def test_what_is_refused(
    case: Case, row: Refused, world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    row.damage(world)
    before = state(world.folder)
    ended = run(words_for(world, row), monkeypatch, capfd)
    message = ended.message
    assert isinstance(ended.error, row.error), (ended, message)
    assert ended.code == ended.error.exit_code
    if row.error is not OrthomergeError:
        assert type(ended.error) is row.error, message
    assert message.startswith("orthomerge: ")
    assert "Traceback" not in message
    assert len(message) < 6000
    for pattern in (row.file, row.tensor, row.way_out):
        assert re.search(pattern, message), (pattern, message)
    after = state(world.folder)
    if row.meets == "evaluate":  # keeps the experts that it has made in its folder, for the next try
        after = {name: what for name, what in after.items() if not re.fullmatch(r"results/out(/experts.*)?", name)}
    assert after == before, "something was left behind or changed"
    assert not world.evil.exists(), "code out of a file was run"


@pytest.mark.parametrize(("case", "row"), rows(Sound))
def test_what_is_sound_after_all(
    case: Case, row: Sound, world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    row.damage(world)
    before = state(world.folder)
    words = words_for(world, row)
    ended = run(words, monkeypatch, capfd)
    assert ended.code == 0, ended.message
    out = Path(words[words.index("--out") + 1])
    assert verify_folder(out) == []
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    shutil.rmtree(out)
    assert state(world.folder) == before
    assert not world.evil.exists()


def test_every_number_is_there_exactly_once() -> None:
    assert [case.number for case in CASES] == list(range(1, 71))
    assert all(case.rows for case in CASES)
    rows_here = [row for case in CASES for row in case.rows if not isinstance(row, Held)]
    assert len(CORRUPTIONS) == len(rows_here), "two rows of a case have the same name"


@pytest.mark.parametrize("held", sorted({row.test for case in CASES for row in case.rows if isinstance(row, Held)}))
def test_tests_that_hold_a_case_exist(held: str) -> None:
    file, _, name = held.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_class_of_error_has_its_own_code() -> None:
    classes = OrthomergeError.__subclasses__()
    assert len({cls.exit_code for cls in classes} - {1}) == len(classes)


SEVERAL = ("02 half a header", "14 parent", "17 evil zip", "25 a stranger", "30 expert", "66 expert")


def test_some_of_them_from_outside(sound: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in processes of their own: exit code, a message, no traceback."""
    found = {f"{case.number:02} {row.name}": row for case in CASES for row in case.rows if isinstance(row, Refused)}
    running = []
    for name in SEVERAL:
        world = World(shutil.copytree(sound, tmp_path / name.replace(" ", "-") / "world"), monkeypatch)
        found[name].damage(world)
        running.append((found[name], world, start(words_for(world, found[name]))))
    for row, world, process in running:
        _, message = process.communicate(timeout=120)
        assert process.returncode == row.error.exit_code, message
        assert message.startswith("orthomerge: ")
        assert "Traceback" not in message
        assert re.search(row.way_out, message), message
        assert not any(world.out.parent.glob("*"))
        assert not world.evil.exists()


def test_standard_output_that_is_closed(sound: Path, tmp_path: Path, start: Start) -> None:
    """A reader that went away (`| head`) is no reason for a traceback, and none to spoil the output."""
    words = ["merge", "--base", str(sound / "base"), "--expert", f"two={sound / 'two'}", "--method", "average"]
    reading, writing = os.pipe()
    os.close(reading)
    process = start([*words, "--out", str(tmp_path / "out"), "--json"], stdout=writing)
    os.close(writing)
    _, message = process.communicate(timeout=120)
    assert process.returncode == 1, message
    assert not message or message.startswith("orthomerge: ")
    assert "Traceback" not in message
    assert verify_folder(tmp_path / "out") == []
