"""Running mutations in a process of its own, with a limit on time and memory for each.

The oracle: what is read is a typed error, or what the reference says. A defect is any other exception, a hang, an
allocation beyond the limit, or the death of the process; its input is kept.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import resource
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz.mutate import mutate
from tests.fuzz.targets import TARGETS, Target

from orthomerge.core.errors import OrthomergeError

CORPUS = Path(__file__).parent / "corpus"
PATIENCE = 10.0  # seconds for one case
_NOWHERE = os.open(os.devnull, os.O_WRONLY)  # standard error may be no file
_OURS = 70  # exit code for a defect of the fuzzer


@dataclass(frozen=True)
class Finding:
    """A defect: what happened, and the file that did it."""

    target: str
    seed: int
    file: str
    what: str
    data: bytes = field(repr=False, default=b"")


@dataclass
class Outcome:
    """What became of many mutations: counts by target of `refused`, `read` and `same` (the mutation undid itself)."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(sum(counter.values()) for counter in self.counts.values())


class _HangError(BaseException):
    """Too long for one case."""


def target_named(name: str) -> Target:
    return next(target for target in TARGETS if target.name == name)


def judge(target: Target, folder: Path) -> tuple[str, str | None]:
    """Read a folder: `refused` or `read`, and what is wrong with that, if anything."""
    try:
        found = target.read(folder)
        return "read", target.check(folder, found)
    except OrthomergeError as error:
        causes = [error.__cause__, error.__context__]
        if any(isinstance(cause, MemoryError) for cause in causes):
            return "refused", "it asked for more memory than the limit"
        return "refused", None if str(error).strip() else "the message is empty"
    except _HangError:
        return "refused", f"it took more than {PATIENCE:g} seconds"
    except (Exception, RecursionError) as error:  # noqa: BLE001 - that is what is looked for
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {str(error)[:200]} ({Path(last.filename).name}:{last.lineno})"
        return "read", text


@contextmanager
def _limits(memory: int) -> Iterator[None]:
    """An alarm for every case, and a ceiling for memory."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise _HangError

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before = signal.signal(signal.SIGALRM, ring)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def cases(target: Target, originals: dict[str, bytes], seeds: range) -> Iterator[tuple[int, str, bytes]]:
    """Seed, file name and mutated bytes."""
    everything = b"".join(originals.values())
    for seed in seeds:
        draw = random.Random(f"{target.name}:{seed}")
        file = draw.choice(target.files)
        yield seed, file, mutate(originals[file], file, draw, everything)


def _work(target: Target, seeds: range, seconds: float, folder: Path, progress: Path) -> dict[str, Any]:
    """In the child: all cases of a range, or as many as there is time for."""
    target.make(folder)
    originals = {file: (folder / file).read_bytes() for file in target.files}
    kind, complaint = judge(target, folder)
    assert (kind, complaint) == ("read", None), (target.name, kind, complaint)
    counts: Counter[str] = Counter()
    findings = []
    until = time.monotonic() + seconds
    at = os.open(progress, os.O_WRONLY | os.O_CREAT)
    with _limits(target.memory):
        for seed, file, data in cases(target, originals, seeds):
            if data == originals[file]:
                counts["same"] += 1
                continue
            os.pwrite(at, seed.to_bytes(8, "little"), 0)
            (folder / file).write_bytes(data)
            faulthandler.dump_traceback_later(3 * PATIENCE, exit=True, file=_NOWHERE)
            signal.setitimer(signal.ITIMER_REAL, PATIENCE)
            kind, complaint = judge(target, folder)
            signal.setitimer(signal.ITIMER_REAL, 0)
            counts[kind] += 1
            if complaint is not None:
                findings.append([seed, file, complaint])
            (folder / file).write_bytes(originals[file])
            if time.monotonic() > until or len(findings) > 200:
                break
    faulthandler.cancel_dump_traceback_later()
    os.close(at)
    return {"counts": counts, "findings": findings}


def _in_child(target: Target, seeds: range, seconds: float) -> tuple[Counter[str], list[Finding], float]:
    """Run `_work` in a fork; a child that dies is a finding at the seed where it was."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    started = time.monotonic()
    try:
        (folder / "world").mkdir()
        child = os.fork()
        if child == 0:
            code = _OURS
            try:
                done = _work(target, seeds, seconds, folder / "world", folder / "progress")
                (folder / "result.json").write_text(json.dumps(done))
                code = 0
            except BaseException:  # noqa: BLE001 - the parent must hear of it
                (folder / "traceback").write_text(traceback.format_exc())
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if (folder / "result.json").exists():
            done = json.loads((folder / "result.json").read_text())
            found = [Finding(target.name, *each) for each in done["findings"]]
            return Counter(done["counts"]), found, time.monotonic() - started
        code = os.waitstatus_to_exitcode(status)
        if code == _OURS:
            raise RuntimeError(f"the fuzzer itself failed on {target.name}: {(folder / 'traceback').read_text()}")
        seed = int.from_bytes((folder / "progress").read_bytes(), "little")
        what = f"the process died or hung (exit code {code})"
        counts = Counter(refused=seed - seeds.start)
        return counts, [Finding(target.name, seed, "?", what)], time.monotonic() - started
    finally:
        shutil.rmtree(folder)


def fuzz(
    count: int,
    *,
    start: int = 0,
    seconds: float = 1e9,
    only: str | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> Outcome:
    """About `count` mutations over all targets by their shares, from seed `start` on, within `seconds`."""
    outcome = Outcome()
    whole = sum(target.share for target in TARGETS if only in (None, target.name))
    for target in TARGETS:
        if only not in (None, target.name):
            continue
        seeds = range(start, start + max(1, round(count * target.share / whole)))
        counts: Counter[str] = Counter()
        spent, time_left = 0.0, seconds * target.share / whole
        while seeds:
            found_counts, found, took = _in_child(target, seeds, time_left - spent)
            counts += found_counts
            spent += took
            outcome.findings += [_with_data(each) for each in found]
            died = [each for each in found if each.file == "?"]
            seeds = range(died[0].seed + 1, seeds.stop) if died and spent < time_left else range(0)
        outcome.counts[target.name], outcome.seconds[target.name] = counts, spent
        say(f"{target.name}: {sum(counts.values()):,} mutations in {spent:.0f} s")
    return outcome


def _with_data(found: Finding) -> Finding:
    """The same with its file, made again from the seed."""
    target = target_named(found.target)
    with tempfile.TemporaryDirectory() as name:
        target.make(Path(name))
        originals = {file: (Path(name) / file).read_bytes() for file in target.files}
        ((_, file, data),) = cases(target, originals, range(found.seed, found.seed + 1))
    return Finding(found.target, found.seed, file, found.what, data)


def replay(target: Target, file: str, data: bytes) -> str | None:
    """What is wrong with one input, in a process of its own; None if nothing is."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target.make(folder)
        (folder / file).write_bytes(data)
        child = os.fork()
        if child == 0:
            with _limits(target.memory):
                faulthandler.dump_traceback_later(3 * PATIENCE, exit=True, file=_NOWHERE)
                signal.setitimer(signal.ITIMER_REAL, PATIENCE)
                complaint = judge(target, folder)[1]
                signal.setitimer(signal.ITIMER_REAL, 0)
            (folder / "complaint").write_text(complaint or "")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            return f"the process died or hung (exit code {os.waitstatus_to_exitcode(status)})"
        return (folder / "complaint").read_text() or None
