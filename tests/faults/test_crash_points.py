"""Every call that changes a file fails, is the last, or is interrupted: the output is absent, old or complete.

`make crash` takes every call; over an older output, of the longer commands, one in nine and all of the last 45.
`make test` takes one of each kind and file, and some around the step that counts.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.injection import Injector, Ran
from tests.faults.stand import STATE, Scenario, Stand, stands_for

ALL = os.environ.get("CRASH_POINTS") == "all"
MOST = {"merge": 8, "align": 4, "fit": 3}  # points a scenario in `make test`
LAST = {"merge": 4, "align": 2, "fit": 2}  # of them at the end, where the output appears
# What each call fails with.
ERRORS = {
    "write": errno.ENOSPC, "create": errno.ENOSPC, "truncate": errno.ENOSPC, "fsync": errno.EIO, "mkdir": errno.EROFS,
    "rename": errno.EACCES, "unlink": errno.EACCES, "rmdir": errno.EIO, "link": errno.EPERM,
}  # fmt: skip
REMOVING = ("unlink", "rmdir")  # what cannot be removed stays; the next run clears it away
SCENARIOS = (
    Scenario("fail"), Scenario("torn"), Scenario("fail", over=True), Scenario("torn", over=True),
    Scenario("fail", over=True, swaps=False), Scenario("torn", over=True, swaps=False), Scenario("full"),
    Scenario("signal"), Scenario("signal", over=True, swaps=False),
)  # fmt: skip


@pytest.fixture(scope="module")
def stands(injected: Injector, experts: Path, merged: Path) -> dict[str, Stand]:
    return stands_for(injected, experts, merged)


def points(name: str, calls: tuple[tuple[str, str], ...], scenario: Scenario) -> list[int]:
    """Which calls to look at; of the scenarios with an older output, `make test` looks at the end alone."""
    every = list(range(1, len(calls) + 1))
    if ALL and scenario.what in ("full", "signal") and name != "merge":
        return every[::7]
    if ALL:  # an older output makes a difference at the end alone
        return every if name == "merge" or not scenario.over else [*every[:-45:9], *every[-45:]]
    if scenario.over or scenario.what in ("full", "signal"):
        return every[-12:-1:2] if name == "merge" and scenario.over else every[len(every) // 3 :: len(every) // 2]
    groups = {(kind, Path(path).name): number for number, (kind, path) in enumerate(calls, 1)}
    firsts, last = sorted(groups.values()), every[-LAST[name] :]
    return sorted({*firsts[:: len(firsts) // MOST[name] + 1], *last})


def failed(stand: Stand, kind: str, ran: Ran) -> Iterator[str]:
    """What is wrong with how a run ended in which a call of a kind failed."""
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
    """What is wrong with how a run ended that was sent a signal; one that was done already may end well."""
    if ran.code != 128 + number and (ran.code or stand.output() != stand.new):
        yield f"exit code {ran.code}: {ran.err}"
    if ran.code and not ran.err.startswith("orthomerge: interrupted; nothing half-written was left behind"):
        yield f"it says: {ran.err}"
    if [name for name in stand.left() if name not in STATE]:
        yield f"left behind: {stand.left()}"


def wrong_at(stand: Stand, scenario: Scenario, k: int, kind: str, seen: set[tuple[str, ...]]) -> Iterator[str]:
    """What is wrong after something happened at call `k`, and after the same command again.

    A longer command is not run again on leftovers that it has met before (`seen`): the next run looks at their names.
    """
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
    met = (str(stand.output() == before), *stand.traces())
    if met not in seen or (ALL and stand.name == "merge"):
        yield from stand.again(scenario)
    seen.add(met)


@pytest.mark.parametrize("name", MOST)
def test_every_call(name: str, stands: dict[str, Stand]) -> None:
    stand, wrong = stands[name], []
    for scenario in SCENARIOS:
        seen: set[tuple[str, ...]] = set()
        calls = stand.counted(scenario).calls
        taken = points(stand.name, calls, scenario)
        for k in taken:
            kind, path = calls[k - 1]
            faults = wrong_at(stand, scenario, k, kind, seen)
            wrong += [f"{scenario} at call {k} ({kind} {path}): {each}" for each in faults]
        print(
            f"{stand.name}: {scenario}: {len(taken)} of {len(calls)} calls, {len(seen)} kinds of leftovers", flush=True
        )
    assert not wrong, f"{len(wrong)} faults\n" + "\n".join(wrong[:40])
