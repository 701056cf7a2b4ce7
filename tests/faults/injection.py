"""Runs of the program in which the k-th call that changes a file fails, kills the process or interrupts it.

`injection.c`, loaded with LD_PRELOAD, counts calls below one folder, whoever makes them: Python, torch, safetensors.
A process that has imported everything (this module, run as a program) forks for each run, so that a run costs what its
own work costs. Jobs come as JSON lines on its standard input, what happened goes back on its standard output.
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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

What = Literal["count", "fail", "kill", "torn", "signal", "full"]
_NUMBERS: dict[str, int] = {"count": 0, "fail": 1, "kill": 2, "torn": 3, "signal": 4, "full": 5}
_SOURCE = Path(__file__).with_name("injection.c")
_ROOT = Path(__file__).resolve().parents[2]
_LONGEST = 120.0  # seconds after which a run hangs


@dataclass(frozen=True)
class Ran:
    """How a run ended. `calls`: (kind, path below the folder) of every call; `open`: descriptors it left open."""

    code: int
    err: str
    calls: tuple[tuple[str, str], ...]
    open: tuple[str, ...]


class Injector:
    """The client's side: `run(words)` is a run of `orthomerge WORDS`."""

    def __init__(self, process: subprocess.Popen[str], root: Path, warm: Path) -> None:
        self.root = root
        self._process = process
        self._warm = warm

    def reset(self) -> Path:
        """Empty the folder below which calls are counted, but for one of temporary files."""
        shutil.rmtree(self.root)
        (self.root / "tmp").mkdir(parents=True)
        return self.root

    def warm_calls(self) -> list[str]:
        """What was called while it loaded everything; ask after the first run."""
        return self._warm.read_text(errors="replace").splitlines()

    def run(self, words: list[str], *, what: What = "count", k: int = 0, code: int = 0, swaps: bool = True) -> Ran:
        """`what` happens at call `k`; `code`: the error number of a failure, or the number of a signal.

        `swaps`: whether the file system can exchange two folders in one step.
        """
        job = {"words": words, "root": str(self.root), "what": _NUMBERS[what], "k": k, "code": code, "swaps": swaps}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError("the process that forks has ended; run it by hand to see why")
        reply = json.loads(line)
        calls = tuple((kind, path) for kind, _, path in (line.partition(" ") for line in reply["calls"]))
        return Ran(reply["code"], reply["err"], calls, tuple(reply["open"]))


@contextmanager
def injector(
    root: Path,
    *,
    warm: list[list[str]],
    settings: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
) -> Iterator[Injector]:
    """Start the process. `warm`: commands that it carries out first, to load all; `settings`: module:name -> value."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler, to see every call of the process")
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as side:
        library = Path(side, "injection.so")
        built = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"]
        subprocess.run(built, check=True, capture_output=True)
        more = {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}
        more |= {"TMPDIR": str(root / "tmp"), "ORTHOMERGE_CACHE": str(root / "cache"), "COLUMNS": "400"}
        more |= {"TOKENIZERS_PARALLELISM": "false"}
        more |= {"PYTHONPATH": os.pathsep.join((str(_ROOT), os.environ.get("PYTHONPATH", "")))}
        about = {"side": side, "root": str(root), "library": str(library), "warm": warm, "settings": settings or {}}
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.injection", json.dumps(about)],
            env={**os.environ, **more, **(environment or {})},
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield Injector(process, root, Path(side, "warm"))
        finally:
            process.stdin.close()  # type: ignore[union-attr]
            process.wait(60)
            process.stdout.close()  # type: ignore[union-attr]


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder that is gone afterwards, in memory where that can be: thousands of syncs cost nothing there."""
    place = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=place if os.access(place, os.W_OK) else None) as folder:
        yield Path(folder)


# The process that forks


def _serve(side: Path, root: str, library: str, warm: list[list[str]], settings: dict[str, Any]) -> None:
    from importlib import import_module

    faults = ctypes.CDLL(library)
    for place, value in settings.items():
        module, _, name = place.partition(":")
        setattr(import_module(module), name, value)
    log = os.open(side / "warm", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    faults.faults_arm(os.fsencode(root), 0, ctypes.c_long(0), ctypes.c_int(0), log)
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
        job = json.loads(line)
        child = os.fork()
        if not child:
            _child(faults, job, side)
        code = _wait(child)
        texts = {name: _read(side / name) for name in ("calls", "err", "open")}
        reply = {
            "code": code,
            "err": texts["err"],
            "calls": texts["calls"].splitlines(),
            "open": texts["open"].splitlines(),
        }
        sys.__stdout__.write(json.dumps(reply) + "\n")  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]


def _child(faults: ctypes.CDLL, job: dict[str, Any], side: Path) -> None:
    """One run; never returns."""
    code = 99
    try:
        null, err = os.open(os.devnull, os.O_RDWR), os.open(side / "err", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        log = os.open(side / "calls", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        (side / "open").write_text("")
        for one, other in ((null, 0), (null, 1), (err, 2)):
            os.dup2(one, other)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        before = _descriptors()
        faults.faults_exchange(int(job["swaps"]))
        faults.faults_arm(
            os.fsencode(job["root"]), job["what"], ctypes.c_long(job["k"]), ctypes.c_int(job["code"]), log
        )
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


def _wait(child: int) -> int:
    end = time.monotonic() + _LONGEST
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 97  # it hung


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


if __name__ == "__main__":
    _given = json.loads(sys.argv[1])
    sys.stdout = sys.stderr  # what the warm-up says is no reply
    _serve(Path(_given["side"]), *(_given[name] for name in ("root", "library", "warm", "settings")))
