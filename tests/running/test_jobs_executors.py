"""Executors: order, errors that cross them, workers that die."""

from __future__ import annotations

import builtins
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.running.job_making import done_files, plan_nothing, until, worker_at

from orthomerge.errors import IncompatibleError, OrthomergeError, RecipeError
from orthomerge.running.jobs.executors import executor_of, failed, told_failure
from orthomerge.running.jobs.job import make_job
from orthomerge.running.jobs.plan import Plan, write_plan
from orthomerge.running.jobs.processes import Processes
from orthomerge.running.jobs.ray import Ray
from orthomerge.running.jobs.serial import Serial
from orthomerge.running.watching import Silent


class Told(Silent):
    """Remembers which jobs ended."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.found: list[str] = []

    def end(self, name: str, *, seconds: float, found: bool) -> None:
        (self.found if found else self.done).append(name)


def test_names() -> None:
    assert executor_of("serial") == Serial()
    assert executor_of("process:3") == Processes(3)
    assert executor_of("process") == Processes(os.cpu_count() or 1)
    assert executor_of("ray") == Ray()
    assert executor_of("ray:2") == Ray(workers=2)
    assert executor_of("ray://head:10001") == Ray(address="ray://head:10001")
    for wrong in ("ray:0", "process:", "slurm", ""):
        with pytest.raises(RecipeError, match="cannot carry out jobs; use serial, process"):
            executor_of(wrong)


@pytest.mark.parametrize("on", ["serial", "process:2"])
def test_needs_come_first_and_what_is_done_is_found(tmp_path: Path, on: str) -> None:
    jobs, watch = plan_nothing(tmp_path, 5), Told()
    done = executor_of(on).map(tmp_path, jobs, watch)
    assert list(done) == [job.key for job in jobs]
    assert watch.done == [job.title for job in jobs]
    before, again = done_files(tmp_path), Told()
    executor_of(on).map(tmp_path, jobs, again)
    assert (again.done, again.found) == ([], watch.done)
    assert done_files(tmp_path) == before


def test_workers_are_processes_of_their_own(tmp_path: Path) -> None:
    jobs = [make_job("nothing", {"number": number, "seconds": 0.5}) for number in range(4)]
    write_plan(tmp_path, Plan(tuple(jobs)))
    pids = {done.pid for done in Processes(2).map(tmp_path, jobs, Silent()).values()}
    assert len(pids) == 2
    assert os.getpid() not in pids


def kill_when_at_work(run: Path, times: int) -> threading.Thread:
    """Kill the worker that holds a lease, so many times."""

    def kill() -> None:
        killed: list[int] = []
        for _ in range(times):
            killed.append(until(lambda: worker_at(run, but=killed)))
            os.kill(killed[-1], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def test_a_worker_that_dies_is_replaced(tmp_path: Path) -> None:
    jobs = plan_nothing(tmp_path, 2, seconds=1)
    killer = kill_when_at_work(tmp_path, 3)
    done = Processes(1).map(tmp_path, jobs, Silent())
    killer.join()
    assert list(done) == [job.key for job in jobs]


def test_a_job_that_kills_its_workers_is_given_up(tmp_path: Path) -> None:
    jobs = plan_nothing(tmp_path, 1, seconds=3)
    killer = kill_when_at_work(tmp_path, 4)
    message = rf"the job 'nothing 0 3' \({jobs[0].key[:12]}\) was tried 4 times .* process \d+ by signal 9; .*fewer"
    with pytest.raises(OrthomergeError, match=message):
        Processes(1).map(tmp_path, jobs, Silent())
    killer.join()


def test_errors_can_be_sent() -> None:
    error = failed(told_failure(IncompatibleError("does not fit; change it")))
    assert (type(error), str(error)) == (IncompatibleError, "does not fit; change it")
    assert type(failed(("SystemExit", "no"))) is OrthomergeError
    assert type(failed(("nearest", "no"))) is OrthomergeError


@pytest.mark.parametrize("on", ["serial", "process:2"])
def test_errors_cross_with_class_and_message(tmp_path: Path, on: str) -> None:
    job = make_job("assemble")
    write_plan(tmp_path, Plan((job,), recipe={"experts": {}}))
    with pytest.raises(RecipeError, match=r"^'experts' is empty: name at least one$"):
        executor_of(on).map(tmp_path, [job], Silent())


def test_ray_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def importing(name: str, *rest: Any, **more: Any) -> Any:
        if name == "ray":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.raises(OrthomergeError, match=r"pip install 'orthomerge\[ray\]'"):
        Ray().map(tmp_path, plan_nothing(tmp_path), Silent())


def test_the_command_line_imports_no_engine() -> None:
    code = "import sys, orthomerge.cli.app; print([name for name in ('ray', 'torch') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
