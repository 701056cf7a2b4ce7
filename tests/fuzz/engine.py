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
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
        result = target.read(folder)
        return "read", target.check(folder, result)
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


def mutated(target: Target, originals: dict[str, bytes], seed: int) -> tuple[str, bytes]:
    """The file that a seed changes, and its bytes afterwards."""
    draw = random.Random(f"{target.name}:{seed}")
    file = draw.choice(target.files)
    return file, mutate(originals[file], file, draw, b"".join(originals.values()))


def _originals(target: Target, folder: Path) -> dict[str, bytes]:
    target.make(folder)
    return {file: (folder / file).read_bytes() for file in target.files}


def _read_one(target: Target, folder: Path) -> tuple[str, str | None]:
    """Judge a folder within the limit on time."""
    faulthandler.dump_traceback_later(3 * PATIENCE, exit=True, file=_NOWHERE)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        return judge(target, folder)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()


def _work(target: Target, seeds: range, seconds: float, folder: Path, progress: Path) -> dict[str, Any]:
    """In the child: all cases of a range, or as many as there is time for."""
    originals = _originals(target, folder)
    assert judge(target, folder) == ("read", None), (target.name, judge(target, folder))
    counts: Counter[str] = Counter()
    findings = []
    until = time.monotonic() + seconds
    with _limits(target.memory):
        for seed in seeds:
            file, data = mutated(target, originals, seed)
            if data == originals[file]:
                counts["same"] += 1
                continue
            progress.write_text(str(seed))
            (folder / file).write_bytes(data)
            kind, complaint = _read_one(target, folder)
            counts[kind] += 1
            if complaint is not None:
                findings.append([seed, file, complaint])
            (folder / file).write_bytes(originals[file])
            if time.monotonic() > until or len(findings) > 200:
                break
    return {"counts": counts, "findings": findings}


def _in_child(work: Callable[[Path], Any]) -> tuple[Any, int, str]:
    """What `work(folder)` gives in a fork, its exit code if it died, and the seed that it had come to."""
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name)
        child = os.fork()
        if child == 0:
            code = _OURS
            try:
                (folder / "world").mkdir()
                (folder / "result.json").write_text(json.dumps(work(folder)))
                code = 0
            except BaseException:  # noqa: BLE001 - the parent must hear of it
                (folder / "traceback").write_text(traceback.format_exc())
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == _OURS:
            raise RuntimeError(f"the fuzzer itself failed: {(folder / 'traceback').read_text()}")
        result = json.loads((folder / "result.json").read_text()) if not code else None
        seed = (folder / "progress").read_text() if (folder / "progress").exists() else ""
        return result, code, seed


def _fuzz_range(target: Target, seeds: range, seconds: float) -> tuple[Counter[str], list[Finding]]:
    """A child that dies is a finding at the seed where it was."""
    done, code, seed = _in_child(lambda folder: _work(target, seeds, seconds, folder / "world", folder / "progress"))
    if done is not None:
        return Counter(done["counts"]), [Finding(target.name, *each) for each in done["findings"]]
    died = Finding(target.name, int(seed), "?", f"the process died or hung (exit code {code})")
    return Counter(refused=died.seed - seeds.start), [died]


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
            started = time.monotonic()
            more, findings = _fuzz_range(target, seeds, time_left - spent)
            counts += more
            spent += time.monotonic() - started
            outcome.findings += [_with_data(each) for each in findings]
            died = [each for each in findings if each.file == "?"]
            seeds = range(died[0].seed + 1, seeds.stop) if died and spent < time_left else range(0)
        outcome.counts[target.name], outcome.seconds[target.name] = counts, spent
        say(f"{target.name}: {sum(counts.values()):,} mutations in {spent:.0f} s")
    return outcome


def _with_data(finding: Finding) -> Finding:
    """The same with its file, made again from the seed."""
    target = target_named(finding.target)
    with tempfile.TemporaryDirectory() as name:
        file, data = mutated(target, _originals(target, Path(name)), finding.seed)
    return replace(finding, file=file, data=data)


def replay(target: Target, file: str, data: bytes) -> str | None:
    """What is wrong with one input, in a process of its own; None if nothing is."""

    def work(folder: Path) -> str | None:
        target.make(folder / "world")
        (folder / "world" / file).write_bytes(data)
        with _limits(target.memory):
            return _read_one(target, folder / "world")[1]

    complaint, code, _ = _in_child(work)
    return f"the process died or hung (exit code {code})" if code else complaint
