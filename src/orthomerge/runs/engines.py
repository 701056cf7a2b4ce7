"""Where artifacts are made: here, in processes of this machine, on Ray, or wherever a user's `Executor` works.

Workers import nothing from the working directory: children start with PYTHONSAFEPATH, and Ray starts in an empty
folder, because it adds that of its start to the path of its workers.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import AbstractContextManager, chdir, contextmanager, nullcontext
from importlib import import_module
from multiprocessing import active_children, get_context
from typing import Any

from orthomerge.core.errors import RecipeError

Engine = Callable[[], AbstractContextManager[Executor]]
On = str | Executor | Callable[[], Executor] | None
_FORMS = "serial, process, process:N, ray, ray:N or module:function"


class Serial(Executor):
    """Calls are made at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        future.set_result(fn(*args, **kwargs))
        return future


def engine_of(on: On) -> Engine:
    """What starts the executor that `on` names; in Python, `on` may be an executor, or a function that gives one."""
    if on is None or on == "serial":
        return lambda: nullcontext(Serial())
    if isinstance(on, Executor):
        return lambda: nullcontext(on)
    if not isinstance(on, str):
        return _started(on)
    name, colon, rest = on.partition(":")
    start = {"process": _processes, "ray": _ray}.get(name)
    if start is not None and (not colon or (rest.isdecimal() and int(rest) > 0)):
        return lambda: start(int(rest) if rest else None)
    if start is not None or not name or not rest:
        raise RecipeError(f"'on' must be {_FORMS}, got {on!r}")
    return _imported(name, rest)


@contextmanager
def _processes(count: int | None) -> Iterator[Executor]:
    """Processes of this machine; whatever ends the run early ends them too."""
    before = set(active_children())
    with _safe_path(), ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        try:
            yield pool
        except BaseException:
            for child in set(active_children()) - before:
                child.terminate()
            raise


class _Ray(Executor):
    """Ray's tasks as an executor."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        import ray

        future: Future[Any] = ray.remote(fn).remote(*args, **kwargs).future()
        return future


@contextmanager
def _ray(count: int | None) -> Iterator[Executor]:
    """Ray on this machine, or the cluster that $RAY_ADDRESS names; with `count`, N workers of this machine."""
    try:
        import ray
    except ImportError as error:
        raise RecipeError("--on ray needs Ray: install orthomerge[ray]") from error
    with tempfile.TemporaryDirectory() as empty, _safe_path():
        with chdir(empty):
            ray.init(num_cpus=count, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        try:
            yield _Ray()
        finally:
            ray.shutdown()


def _imported(module: str, name: str) -> Engine:
    """A function of a module that is installed, or on PYTHONPATH; the working directory is not looked at."""
    before = list(sys.path)
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    here = os.path.realpath(".")
    sys.path[:] = [place for place in before if place and (place in named or os.path.realpath(place) != here)]
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RecipeError(
            f"cannot import {name!r} of {module!r}: {error}; 'on' must be {_FORMS}, and the module must be installed "
            "or on PYTHONPATH"
        ) from error
    finally:
        sys.path[:] = before
    if not callable(function):
        raise RecipeError(f"{module}:{name} must be a function that returns an Executor, got {type(function).__name__}")
    return _started(function)


def _started(function: Callable[[], Executor]) -> Engine:
    @contextmanager
    def start() -> Iterator[Executor]:
        with _safe_path(), function() as executor:
            yield executor

    return start


@contextmanager
def _safe_path() -> Iterator[None]:
    """Children that are started inside do not have the working directory on their path."""
    before = os.environ.get("PYTHONSAFEPATH", "")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        os.environ["PYTHONSAFEPATH"] = before  # empty: as if it were not set
