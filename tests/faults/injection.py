"""Runs of the program in which the k-th call that changes a file fails, kills the process or interrupts it.

`injection.c`, loaded with LD_PRELOAD, counts calls below one folder, whoever makes them: Python, torch, safetensors.
A process that has imported everything (this module, run as a program) forks for each run, so that a run costs what its
own work costs. Jobs come as JSON lines on its standard input, exit codes go back on its standard output.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.calling import child

What = Literal["count", "fail", "torn", "signal", "full"]
_NUMBERS: dict[str, int] = {"count": 0, "fail": 1, "torn": 3, "signal": 4, "full": 5}
_SOURCE = Path(__file__).with_name("injection.c")
_ROOT = Path(__file__).resolve().parents[2]
_LONGEST = 120  # seconds after which a run hangs


@dataclass(frozen=True)
class Ran:
    """Result of a run. `calls`: (kind, path below the folder) of every call; `open`: descriptors it left open."""

    code: int
    err: str
    calls: tuple[tuple[str, str], ...]
    open: tuple[str, ...]


class Injector:
    """The client's side: `run(words)` is a run of `orthomerge WORDS`; `side` is where it leaves what happened."""

    def __init__(self, ask: Callable[[object], int], root: Path, side: Path) -> None:
        self.root = root
        self._ask = ask
        self._side = side

    def reset(self) -> Path:
        """Empty the folder below which calls are counted, but for one of temporary files."""
        shutil.rmtree(self.root)
        (self.root / "tmp").mkdir(parents=True)
        return self.root

    def warm_calls(self) -> list[str]:
        """List what was called while everything was loaded; ask after the first run."""
        return self._lines("warm")

    def run(self, words: list[str], *, what: What = "count", k: int = 0, code: int = 0, swaps: bool = True) -> Ran:
        """Make `what` happen at call `k`; `code`: the error number of a failure, or the number of a signal.

        `swaps`: whether the file system can exchange two folders in one step.
        """
        job = {"words": words, "what": _NUMBERS[what], "k": k, "code": code, "swaps": swaps}
        end = self._ask(job)
        calls = tuple((kind, path) for kind, _, path in (line.partition(" ") for line in self._lines("calls")))
        return Ran(end, "\n".join(self._lines("err")), calls, tuple(self._lines("open")))

    def _lines(self, name: str) -> list[str]:
        return (self._side / name).read_text(errors="replace").splitlines()


@contextmanager
def injector(root: Path, *, warm: list[list[str]], environment: dict[str, str]) -> Iterator[Injector]:
    """Start the process. `warm`: commands that it carries out first, to load all."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler, to see every call of the process")
    root.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as side:
        library = Path(side, "injection.so")
        built = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"]
        subprocess.run(built, check=True, capture_output=True)
        settings = {
            "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "TMPDIR": str(root / "tmp"),
            "ORTHOMERGE_CACHE": str(root / "cache"), "COLUMNS": "400", "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join((str(_ROOT), os.environ.get("PYTHONPATH", ""))),
        }  # fmt: skip
        words = ["-m", "tests.faults.injection", json.dumps([side, str(root), str(library), warm])]
        with child(words, _ROOT, {**settings, **environment}) as ask:
            yield Injector(ask, root, Path(side))


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder that is gone afterwards, in memory where that can be: thousands of syncs cost nothing there."""
    place = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=place if os.access(place, os.W_OK) else None) as folder:
        yield Path(folder)


# The process that forks


def _serve(side: Path, root: str, library: str, warm: list[list[str]]) -> None:
    from orthomerge.fitting import fit

    faults = ctypes.CDLL(library)
    fit._BETWEEN = 0.0  # a fit keeps its state at every look
    _arm(faults, root, side / "warm", {"what": 0, "k": 0, "code": 0})
    for words in warm:
        code = _command(words)
        if code:
            raise SystemExit(f"warming up: {words} ended with {code}")
    faults.faults_disarm()
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - a count is all
    assert threads == 1, f"{threads} threads: a fork would lose all but one"
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _child(faults, root, side, json.loads(line))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(code, file=sys.__stdout__, flush=True)


def _arm(faults: ctypes.CDLL, root: str, calls: Path, job: dict[str, Any]) -> None:
    log = os.open(calls, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    faults.faults_arm(os.fsencode(root), job["what"], ctypes.c_long(job["k"]), ctypes.c_int(job["code"]), log)


def _child(faults: ctypes.CDLL, root: str, side: Path, job: dict[str, Any]) -> None:
    """One run; never returns."""
    signal.alarm(_LONGEST)  # its end, if it hangs
    code = 99
    try:
        null, err = os.open(os.devnull, os.O_RDWR), os.open(side / "err", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        (side / "open").write_text("")
        for one, other in ((null, 0), (null, 1), (err, 2)):
            os.dup2(one, other)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        faults.faults_exchange(int(job["swaps"]))
        _arm(faults, root, side / "calls", job)
        before = _descriptors()
        code = _command(job["words"])
        faults.faults_disarm()
        gc.collect()
        (side / "open").write_text("".join(f"{name}\n" for name in sorted(_descriptors() - before)))
    except BaseException:  # noqa: BLE001 - whatever it is, the reader of `err` shall see it
        import traceback

        traceback.print_exc()
        code = 98
    finally:
        sys.stderr.flush()
        os._exit(code)


def _command(words: list[str]) -> int:
    from orthomerge.cli.app import main

    sys.argv = ["orthomerge", *words]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _descriptors() -> set[str]:
    names = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are all
        try:
            names.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")  # noqa: PTH115
        except OSError:  # the one that listed the folder
            continue
    return names


if __name__ == "__main__":
    sys.stdout = sys.stderr  # what the warm-up says is no reply
    _side, *_others = json.loads(sys.argv[1])
    _serve(Path(_side), *_others)
