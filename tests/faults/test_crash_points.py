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
INTERRUPTED = "orthomerge: interrupted; nothing half-written was left behind"
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

    def stands_aside(self, before: dict[str, bytes]) -> bool:
        """Whether the older output is where it waits between two renames."""
        aside = next(self.injector.root.glob(".out.orthomerge-????????/old"), None)
        return aside is not None and outcome(aside) == before


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


def wrong_at(stand: Stand, scenario: Scenario, k: int, kind: str) -> list[str]:
    """Complaints after something happened at call `k`: the output must be absent, old or complete."""
    before = stand.reset(scenario)
    number = (signal.SIGINT, signal.SIGTERM)[k % 2]
    codes: dict[str, int] = {"full": errno.ENOSPC, "signal": number}
    ran = stand.run(scenario, k=k, code=codes.get(scenario.what, ERRORS[kind]))
    now, left = stand.output(), stand.left()
    complete, strays = now == stand.new, [name for name in left if name not in STATE]
    may_be_aside = scenario.what == "torn" and not scenario.swaps  # a kill between two renames
    wrong: dict[str, object] = {
        "the output is broken": now not in (None, before, stand.new),
        "the older output is gone": before and now is None and not (may_be_aside and stand.stands_aside(before)),
        "the output does not verify": complete and verify_folder(stand.out),
    }
    if scenario.what == "torn":
        wrong["it was not killed"] = ran.code not in (-9, 0)
    elif scenario.what == "signal":  # a run that was done already may end well
        wrong["it has another exit code"] = ran.code != 128 + number and (ran.code or not complete)
        wrong["it says something else"] = ran.code and not ran.err.startswith(INTERRUPTED)
        wrong["it left files behind"] = strays
    else:
        wrong |= {
            "it left descriptors open": ran.open,
            "it shows a traceback": "Traceback" in ran.err or "Exception ignored" in ran.err,
            "it says that all is well, but the output is not the new one": not ran.code and not complete,
            "it has another exit code": ran.code and (ran.code != 5 or not ran.err.startswith("orthomerge: ")),
            "it does not say which output is there": ran.code and complete != ("is complete, but" in ran.err),
            "it left files behind": strays and kind not in REMOVING,
            "it says that nothing was left behind": left and "nothing was left behind" in ran.err,
        }
    complaints = [f"{what}: {ran.code}, {left}, {ran.err}" for what, is_so in wrong.items() if is_so]
    return complaints + wrong_again(stand, scenario, complete=complete)


def wrong_again(stand: Stand, scenario: Scenario, *, complete: bool) -> list[str]:
    """Complaints about the same command once more, which makes the output, unless that is there, and clears up."""
    ran = stand.run(replace(scenario, what="count"))
    wrong: dict[str, object] = {
        "fails": ran.code and not (complete and ran.code == 5 and "exists already" in ran.err),
        "gives other bytes": stand.output() != stand.new,
        "did not clear up": not ran.code and stand.left(),
    }
    return [f"the same command again {what}: {ran.code}, {ran.err}" for what, is_so in wrong.items() if is_so]


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
