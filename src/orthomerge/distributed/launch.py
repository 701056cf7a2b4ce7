"""The start and the end of a run of several processes: one drives, the others serve, all exit with the same code."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

from orthomerge.distributed.group import Group, open_group
from orthomerge.errors import OrthomergeError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from orthomerge.distributed.failures import Failures

__all__ = ["launch", "under_torchrun"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_INTERRUPTED = tuple(128 + number for number in _SIGNALS)


def under_torchrun() -> bool:
    """Whether torchrun, or whoever sets its variables, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(act: Callable[[], object]) -> NoReturn:
    """Run `act` in the first process, with the help of the others; ends the process.

    An error of ours is told in a line. `act` may end by `SystemExit`, as commands do.
    """
    try:
        group = open_group()
    except OrthomergeError as error:
        sys.stderr.write(f"orthomerge: {error}\n")
        _exit(error.exit_code)
    if group.failures is None:
        raise AssertionError("an open group has somewhere to leave notes")
    group.failures.watch()
    _exit(_serve(group) if group.rank else _drive(group, act))


def _drive(group: Group, act: Callable[[], object]) -> int:
    """The exit code, once all is told that is to be told."""
    failures = group.failures
    if failures is None:
        raise AssertionError("see `launch`")
    _heed_signals(failures)
    code, message = 0, "the first process ended early"
    try:
        act()
    except SystemExit as done:
        _ignore_signals()
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
        if code in _INTERRUPTED:
            sys.stderr.write("orthomerge: interrupted; nothing half-written was left behind: run it again to go on\n")
    except OrthomergeError as error:
        _ignore_signals()
        code, message = error.exit_code, str(error)
        sys.stderr.write(f"orthomerge: {message}\n")
    except BaseException:  # noqa: BLE001 - a defect, told as Python tells it
        _ignore_signals()
        code = 1
        traceback.print_exc()
    if not code:
        failures.stop()
        group.end()
        group.close()
        return 0
    code = failures.tell(message, code).code
    group.abort()
    failures.all_gone()
    return code


def _heed_signals(failures: Failures) -> None:
    """SIGINT and SIGTERM end the run in order; if torchrun sends them since another process failed, as it failed."""

    def stop(number: int, frame: FrameType | None) -> None:
        _ignore_signals()
        if not failures.raised:  # else it is ending already, and may be clearing up
            raise SystemExit(128 + number) if failures.note() is None else failures.found()

    for number in _SIGNALS:
        signal.signal(number, stop)


def _ignore_signals() -> None:
    """The process is ending already; torchrun sends one as soon as any other has gone."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _serve(group: Group) -> int:
    failures = group.failures
    if failures is None:
        raise AssertionError("see `launch`")
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # there is nothing to clear up, and the first process tells of it
    try:
        group.serve()
    except OrthomergeError as error:
        code, message = error.exit_code, str(error)
    except BaseException:  # noqa: BLE001 - a defect, told as Python tells it
        code, message = 1, traceback.format_exc()
    else:
        failures.stop()
        group.close()
        return 0
    note = failures.tell(message, code)
    group.abort()
    if not failures.was_heard() and note.rank == group.rank:
        sys.stderr.write(f"orthomerge: process {group.rank}: {message}\n")
    failures.gone()
    return note.code


def _exit(code: int) -> NoReturn:
    """Without taking torch down module by module."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = code or 1
    os._exit(code)
