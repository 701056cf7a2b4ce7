"""Every call that changes a file fails, is the last, or is interrupted: the output is absent, old or complete.

`make crash` takes every call; `make test` one of each kind and file, and some around the step that counts.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.berts import contents
from tests.faults.injection import Injector, Ran, What
from tests.faults.tiny import commands

from orthomerge.files.folders import MANIFEST
from orthomerge.models.saved import verify_folder

ALL = os.environ.get("CRASH_POINTS") == "all"
MOST = {"merge": 8, "align": 4, "fit": 3}  # kinds per scenario in `make test`; half as many calls at the end
# What each call fails with.
ERRORS = {
    "write": errno.ENOSPC, "create": errno.ENOSPC, "truncate": errno.ENOSPC, "fsync": errno.EIO, "mkdir": errno.EROFS,
    "rename": errno.EACCES, "unlink": errno.EACCES, "rmdir": errno.EIO, "link": errno.EPERM,
}  # fmt: skip
REMOVING = ("unlink", "rmdir")  # what cannot be removed stays; the next run clears it away
STATE = (".out.fitting", ".out.fitting/.orthomerge-state", ".out.fitting/state.pt")  # from which a fit goes on
KEPT = re.compile(r"out(/.*)?|tmp|cache(/features(/[0-9a-f]{64}\.safetensors)?)?")


@dataclass(frozen=True)
class Scenario:
    """A kind of fault. `over`: an older output is there, and the command has `--force`."""

    what: What
    over: bool = False
    swaps: bool = True


SCENARIOS = (
    Scenario("fail"), Scenario("torn"), Scenario("fail", over=True), Scenario("torn", over=True),
    Scenario("fail", over=True, swaps=False), Scenario("torn", over=True, swaps=False), Scenario("full"),
    Scenario("signal"), Scenario("signal", over=True, swaps=False),
)  # fmt: skip


def outcome(folder: Path) -> dict[str, bytes]:
    """Read every file by name. A file counts as a link where no link can be made."""
    files = contents(folder)
    if MANIFEST in files:
        manifest = json.loads(files[MANIFEST])
        for row in manifest["files"].values():
            row.pop("link", None)
        files[MANIFEST] = json.dumps(manifest).encode()
    return files


@dataclass(frozen=True)
class Stand:
    """A command under test. `older`: an output of it with another seed; `new`: the bytes of the one that it makes."""

    name: str
    injector: Injector
    words: list[str]
    older: Path
    new: dict[str, bytes]

    @property
    def out(self) -> Path:
        return self.injector.root / "out"

    def reset(self, scenario: Scenario) -> dict[str, bytes] | None:
        """Make everything as it was before the command; gives the bytes of the output that is there."""
        self.injector.reset()
        if not scenario.over:
            return None
        shutil.copytree(self.older, self.out)
        return outcome(self.out)

    def run(self, scenario: Scenario, *, k: int = 0, code: int = 0) -> Ran:
        words = [*self.words, *(["--force"] if scenario.over else [])]
        return self.injector.run(words, what=scenario.what, k=k, code=code, swaps=scenario.swaps)

    def calls(self, scenario: Scenario) -> tuple[tuple[str, str], ...]:
        """List the calls of a run in which nothing happens; it must be right."""
        self.reset(scenario)
        ran = self.run(scenario)
        assert (ran.code, self.output() == self.new, self.left()) == (0, True, []), ran.err
        return ran.calls

    def output(self) -> dict[str, bytes] | None:
        return outcome(self.out) if os.path.lexists(self.out) else None

    def left(self) -> list[str]:
        """Name whatever is there besides the output and whole entries of the cache."""
        root = self.injector.root
        names = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*"))]
        return [name for name in names if not KEPT.fullmatch(name)]

    def broken(self, scenario: Scenario, before: dict[str, bytes] | None) -> Iterator[str]:
        """The output must be absent, old or complete; with two renames, the old one may stand aside after a kill."""
        now = self.output()
        if now == self.new:
            yield from verify_folder(self.out)
        elif now != before:
            aside = next(self.injector.root.glob(".out.orthomerge-????????/old"), None)
            stands = aside is not None and outcome(aside) == before
            if now is not None or scenario.swaps or scenario.what != "torn" or not stands:
                yield "the output is broken" if now is not None else "the older output is gone"

    def again(self, scenario: Scenario) -> Iterator[str]:
        """The same command once more makes the output, unless that is there, and clears up."""
        done = self.output() == self.new
        ran = self.run(replace(scenario, what="count"))
        if ran.code and not (done and ran.code == 5 and "exists already" in ran.err):
            yield f"the same command again: {ran.code} {ran.err}"
        if self.output() != self.new:
            yield "the same command again gives other bytes"
        if not ran.code and (left := self.left()):
            yield f"the same command again did not clear up: {left}"


def make_stand(name: str, injector: Injector, experts: Path, merged: Path) -> Stand:
    older, out = injector.root.parent / f"older-{name}", injector.reset() / "out"
    stand = Stand(name, injector, [*commands(experts, merged)[name], "--out", str(out)], older, {})
    ran = stand.run(Scenario("count"))
    assert ran.code == 0, ran.err
    stand.new.update(outcome(out))
    assert stand.new != outcome(older)
    return stand


def points(name: str, calls: tuple[tuple[str, str], ...], scenario: Scenario) -> list[int]:
    """Numbers of the calls to look at; of the scenarios with an older output, `make test` looks at the end alone."""
    every = list(range(1, len(calls) + 1))
    if ALL:
        return every
    if scenario.over:
        return every[-12:-1:2]
    if scenario.what in ("full", "signal"):
        return every[len(every) // 3 :: len(every) // 2]
    groups = {(kind, Path(path).name): number for number, (kind, path) in enumerate(calls, 1)}
    firsts, last = sorted(groups.values()), every[-(MOST[name] + 1) // 2 :]
    return sorted({*firsts[:: len(firsts) // MOST[name] + 1], *last})


def failed(stand: Stand, kind: str, ran: Ran) -> Iterator[str]:
    """Complaints about a run in which a call of a kind failed."""
    complete, left = stand.output() == stand.new, stand.left()
    if ran.open:
        yield f"left open: {ran.open}"
    if "Traceback" in ran.err or "Exception ignored" in ran.err:
        yield ran.err
    if ran.code == 0 and not complete:
        yield "it says that all is well, but the output is not the new one"
    if ran.code and (ran.code != 5 or not ran.err.startswith("orthomerge: ")):
        yield f"exit code {ran.code}: {ran.err}"
    if ran.code and complete != ("is complete, but" in ran.err):
        yield f"the message does not say which output is there: {ran.err}"
    if [name for name in left if name not in STATE] and kind not in REMOVING:
        yield f"left behind: {left}"
    if left and "nothing was left behind" in ran.err:
        yield f"{left} was left behind, but the message says: {ran.err}"


def interrupted(stand: Stand, number: int, ran: Ran) -> Iterator[str]:
    """Complaints about a run that was sent a signal; one that was done already may end well."""
    if ran.code != 128 + number and (ran.code or stand.output() != stand.new):
        yield f"exit code {ran.code}: {ran.err}"
    if ran.code and not ran.err.startswith("orthomerge: interrupted; nothing half-written was left behind"):
        yield f"it says: {ran.err}"
    if [name for name in stand.left() if name not in STATE]:
        yield f"left behind: {stand.left()}"


def wrong_at(stand: Stand, scenario: Scenario, k: int, kind: str) -> Iterator[str]:
    """Complaints after something happened at call `k`, and after the same command again."""
    before = stand.reset(scenario)
    number = (signal.SIGINT, signal.SIGTERM)[k % 2]
    codes: dict[str, int] = {"full": errno.ENOSPC, "signal": number}
    ran = stand.run(scenario, k=k, code=codes.get(scenario.what, ERRORS[kind]))
    yield from stand.broken(scenario, before)
    if scenario.what == "signal":
        yield from interrupted(stand, number, ran)
    elif scenario.what != "torn":
        yield from failed(stand, kind, ran)
    elif ran.code not in (-9, 0):
        yield f"it was not killed: {ran.code} {ran.err}"
    yield from stand.again(scenario)


@pytest.mark.parametrize("name", MOST)
def test_every_call(name: str, injected: Injector, experts: Path, merged: Path) -> None:
    stand, wrong = make_stand(name, injected, experts, merged), list[str]()
    known: dict[Scenario, tuple[tuple[str, str], ...]] = {}  # calls do not depend on what happens
    for scenario in SCENARIOS:
        if scenario.over and name != "merge" and not ALL:  # one step replaces the output of every command
            continue
        quiet = replace(scenario, what="count")
        known[quiet] = calls = known.get(quiet) or stand.calls(quiet)
        taken = points(name, calls, scenario)
        for k in taken:
            kind, path = calls[k - 1]
            wrong += [f"{scenario} at call {k} ({kind} {path}): {each}" for each in wrong_at(stand, scenario, k, kind)]
        print(f"{name}: {scenario}: {len(taken)} of {len(calls)} calls")
    assert not wrong, f"{len(wrong)} faults\n" + "\n".join(wrong[:40])
