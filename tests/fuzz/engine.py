"""Running mutations in a process of its own, with a limit on time and memory for each.

The oracle: what is read is a typed error, or what the reference says. A defect is any other exception, a hang, an
allocation beyond the limit, or the death of the process.
"""

from __future__ import annotations

import faulthandler
import os
import random
import resource
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import ParamSpec, TypeVar

from tests.fuzz.mutate import mutate
from tests.fuzz.targets import TARGETS, Target

from orthomerge.core.errors import OrthomergeError

P = ParamSpec("P")
T = TypeVar("T")
CORPUS = Path(__file__).parent / "corpus"
PATIENCE = 10.0  # CPU seconds for one case
_ENOUGH = 50  # defects of a target after which nothing else is tried
_NOWHERE = os.open(os.devnull, os.O_WRONLY)  # standard error may be no file
_DIED = "the process died or hung"


@dataclass(frozen=True)
class Finding:
    """A defect: what happened, and the seed and the file that did it."""

    target: str
    seed: int
    file: str
    what: str


class _HangError(BaseException):
    """Too long for one case."""


def fuzz(name: str, seeds: range) -> tuple[Counter[str], list[Finding]]:
    """Try the mutations of a range of seeds on one target.

    Counts are of `refused`, `read` and `same` (the mutation undid itself). A child that dies is a finding at the seed
    that it had come to; the next child goes on from there.
    """
    counts, findings = Counter[str](), list[Finding]()
    while seeds and len(findings) < _ENOUGH:
        with _folder() as folder:
            try:
                more, defects = _in_child(_work, name, seeds, folder)
                seeds = range(0)
            except BrokenProcessPool:
                seed = int((folder / "progress").read_text())
                more, defects = Counter(refused=seed - seeds.start), [Finding(name, seed, "?", _DIED)]
                seeds = range(seed + 1, seeds.stop)
        counts += more
        findings += defects
    return counts, findings


def replay(name: str, file: str, data: bytes) -> str | None:
    """What is wrong with one input, in a process of its own; None if nothing is."""
    with _folder() as folder:
        try:
            return _in_child(_read_changed, name, file, data, folder)
        except BrokenProcessPool:
            return _DIED


def mutated(target: Target, originals: dict[str, bytes], seed: int) -> tuple[str, bytes]:
    """The file that a seed changes, and its bytes afterwards."""
    draw = random.Random(f"{target.name}:{seed}")
    file = draw.choice(target.files)
    return file, mutate(originals[file], file, draw, b"".join(originals.values()))


def make_originals(target: Target, folder: Path) -> dict[str, bytes]:
    """Write the valid files of a target; those that are mutated, by name."""
    target.make(folder)
    return {file: (folder / file).read_bytes() for file in target.files}


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        (Path(name) / "world").mkdir()
        yield Path(name)


def _in_child(work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(work, *args, **options).result()


# In the child


def _work(name: str, seeds: range, folder: Path) -> tuple[Counter[str], list[Finding]]:
    target, world = TARGETS[name], folder / "world"
    originals = make_originals(target, world)
    assert _judge(target, world) == ("read", None), (name, _judge(target, world))
    counts, findings = Counter[str](), list[Finding]()
    _limit_memory(target.memory)
    for seed in seeds:
        file, data = mutated(target, originals, seed)
        if data == originals[file]:
            counts["same"] += 1
            continue
        (folder / "progress").write_text(str(seed))
        (world / file).write_bytes(data)
        kind, complaint = _read_in_time(target, world)
        counts[kind] += 1
        if complaint is not None:
            findings.append(Finding(name, seed, file, complaint))
        (world / file).write_bytes(originals[file])
        if len(findings) == _ENOUGH:
            break
    return counts, findings


def _read_changed(name: str, file: str, data: bytes, folder: Path) -> str | None:
    target, world = TARGETS[name], folder / "world"
    target.make(world)
    (world / file).write_bytes(data)
    _limit_memory(target.memory)
    return _read_in_time(target, world)[1]


def _limit_memory(memory: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read_in_time(target: Target, folder: Path) -> tuple[str, str | None]:
    """Judge a folder within the limit on CPU time; one that waits for something ends the process."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise _HangError

    signal.signal(signal.SIGPROF, ring)
    faulthandler.dump_traceback_later(10 * PATIENCE, exit=True, file=_NOWHERE)
    signal.setitimer(signal.ITIMER_PROF, PATIENCE)
    try:
        return _judge(target, folder)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()


def _judge(target: Target, folder: Path) -> tuple[str, str | None]:
    """Read a folder: `refused` or `read`, and what is wrong with that, if anything."""
    try:
        return "read", target.check(folder, target.read(folder))
    except OrthomergeError as error:
        if isinstance(error.__cause__, MemoryError) or isinstance(error.__context__, MemoryError):
            return "refused", "it asked for more memory than the limit"
        return "refused", None if str(error).strip() else "the message is empty"
    except _HangError:
        return "refused", f"it took more than {PATIENCE:g} seconds"
    except (Exception, RecursionError) as error:  # noqa: BLE001 - that is what is looked for
        last = traceback.extract_tb(error.__traceback__)[-1]
        return "read", f"{type(error).__name__}: {str(error)[:200]} ({Path(last.filename).name}:{last.lineno})"
