"""Every fault of `cases.py` through the command line: error, message, exit code, and nothing left behind.

Also: promises of docs/guarantees.md, and fault cases that are held elsewhere, name tests that exist.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
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
import torch
from tests.berts import merge_berts, write_tables
from tests.faults.cases import HELD, LINES, ODD, ROWS, Row
from tests.faults.corruptions import EVIL, QUERY, added, both, configured, cut, without

from orthomerge.cli.app import main
from orthomerge.core.errors import CheckpointError, OrthomergeError
from orthomerge.core.progress import Progress
from orthomerge.models.saved import verify_folder
from orthomerge.runs.models import write
from orthomerge.runs.recipe import Recipe

ROOT, OUT = Path(__file__).parents[2], Path("results/out")
Start = Callable[..., "subprocess.Popen[str]"]


@dataclass(frozen=True)
class Ended:
    code: int
    error: BaseException | None
    out: str
    message: str


Run = Callable[[str], Ended]


@pytest.fixture(scope="module")
def sound(berts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    shutil.copytree(berts, folder, dirs_exist_ok=True)
    (folder / "data").mkdir()
    write_tables(folder / "data")
    merge_berts(berts, folder / "merged")
    for name in ("results", "tmp"):
        (folder / name).mkdir()
    return folder


@pytest.fixture
def world(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The working directory, and what hostile code may ask of the environment."""
    folder = shutil.copytree(sound, tmp_path / "world")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path_factory.getbasetemp() / "case-cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """`run(line)`: the program's own `main`, in this process."""

    def runner(line: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["orthomerge", *shlex.split(line)])
        before = signal.getsignal(signal.SIGTERM)
        capfd.readouterr()
        code, error = 0, None
        try:
            main()
        except SystemExit as end:
            code, error = end.code if isinstance(end.code, int) else int(end.code is not None), end.__context__
        finally:
            signal.signal(signal.SIGTERM, before)
        return Ended(code, error, *capfd.readouterr())

    return runner


def state(folder: Path) -> dict[str, Any]:
    """List every path below a folder with its content."""
    paths: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        kind = path.lstat().st_mode
        size = path.stat().st_size if path.is_file() else 0
        content = path.read_bytes() if path.is_file() and not path.is_symlink() and size < 1 << 22 else size
        paths[str(path.relative_to(folder))] = (kind, content)
    return paths


def rows(*, refused: bool) -> Any:
    chosen = [row for row in ROWS if (row.error is not None) == refused]
    return [pytest.param(row, id=f"{row.number:02}-{row.name}".replace(" ", "-")) for row in chosen]


@pytest.mark.parametrize("row", rows(refused=True))
def test_what_is_refused(row: Row, world: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    row.damage(monkeypatch)
    before = state(world)
    ended = run(row.words)
    message = ended.message
    assert type(ended.error) is row.error, (ended, message)
    assert ended.code == row.error.exit_code
    assert message.startswith("orthomerge: ")
    assert "Traceback" not in message
    assert len(message) < 6000
    for pattern in row.says:
        assert re.search(pattern, message), (pattern, message)
    assert state(world) == before, "something was left behind or changed"
    assert not Path(EVIL).exists(), "code out of a file was run"


@pytest.mark.parametrize("row", rows(refused=False))
def test_what_is_sound_after_all(row: Row, world: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    row.damage(monkeypatch)
    before = state(world)
    ended = run(row.words)
    assert ended.code == 0, ended.message
    (out,) = (world / "results").iterdir()
    assert out.name in (OUT.name, ODD)
    assert verify_folder(out) == []
    shutil.rmtree(out)
    assert state(world) == before
    assert not Path(EVIL).exists()


def test_every_number_is_there() -> None:
    assert {row.number for row in ROWS}.union(HELD) == set(range(71))
    names = [(row.number, row.name) for row in ROWS]
    assert len(set(names)) == len(names), "two rows of a case have the same name"


def test_every_class_of_error_has_its_own_code() -> None:
    classes = OrthomergeError.__subclasses__()
    assert len({cls.exit_code for cls in classes} - {1}) == len(classes)


def test_standard_output_that_is_closed(sound: Path, tmp_path: Path, start: Start) -> None:
    """A reader that went away (`| head`) is no reason for a traceback, and none to spoil the output."""
    words = ["merge", f"two={sound / 'two'}", "--base", str(sound / "base"), "--method", "average"]
    reading, writing = os.pipe()
    os.close(reading)
    process = start([*words, "--out", str(tmp_path / "out"), "--json"], stdout=writing)
    os.close(writing)
    _, message = process.communicate(timeout=120)
    assert process.returncode == 1, message
    assert not message or message.startswith("orthomerge: ")
    assert "Traceback" not in message
    assert verify_folder(tmp_path / "out") == []


def test_all_problems_are_listed_at_once(world: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    both(without(QUERY), added("x", torch.ones(2), "three"), cut("five/model.safetensors", 0.1))(monkeypatch)
    ended = run(f"{LINES['merge']} --set scael=1")
    assert ended.code == 2
    for part in ("'scael'", "expert 'five'", "expert 'two'", "expert 'three'", "4 problems:"):
        assert part in ended.message
    ended = run(f"{LINES['merge']} --set scael=1 --dry-run --json")
    assert ended.code == 2
    problems = json.loads(ended.out)["problems"]
    places = ["method", "expert 'five'", "expert 'two'", "expert 'three'"]
    assert [problem["where"].split(" (")[0] for problem in problems] == places
    assert all(problem["what"] and problem["fix"] for problem in problems)


def test_labels_in_any_writing(world: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = {"0": "| <b>`schön`\n", "1": "half a pair: \ud83d"}
    configured(id2label=labels)(monkeypatch)
    assert run(LINES["merge"]).code == 0
    manifest = json.loads((OUT / "orthomerge.json").read_text())
    assert manifest["heads"]["two"]["labels"] == list(labels.values())
    assert verify_folder(OUT) == []


class _Meddler(Progress):
    """Changes an input while it is merged."""

    def advance(self, count: int) -> None:
        os.utime("two/model.safetensors", ns=(1, 1))


def test_an_input_that_changes_meanwhile(world: Path) -> None:
    with pytest.raises(CheckpointError, match=r"two/model.safetensors changed while it was read; run the command"):
        write(Recipe({"two": "./two"}, base="./base"), out=OUT, progress=_Meddler())
    assert list(OUT.parent.iterdir()) == []


# docs/guarantees.md

NAMED = re.compile(r"`(tests/[\w/]+\.py::\w+)`")


def promises() -> list[str]:
    lines = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("| ") and not line.startswith(("| promise |", "|---"))]


def test_every_promise_names_a_test() -> None:
    assert len(promises()) > 15
    assert [row for row in promises() if not NAMED.search(row)] == []


def test_every_test_that_is_named_exists() -> None:
    missing = []
    for test in {*NAMED.findall("\n".join(promises())), *HELD.values()}:
        file, _, name = test.partition("::")
        path = ROOT / file
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.exists() else ()
        if name not in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}:
            missing.append(test)
    assert missing == []
