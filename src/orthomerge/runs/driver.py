"""Make the artifacts of a run on any `concurrent.futures.Executor`, each when its inputs are in the store.

Workers import nothing from the working directory: child processes start with PYTHONSAFEPATH, and Ray starts in an empty
folder, because it adds the folder where it starts to the path of its workers.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, chdir, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from orthomerge.core.device import fixed_threads
from orthomerge.core.errors import OrthomergeError, OutputError, RecipeError
from orthomerge.runs.store import Entry
from orthomerge.runs.work import Work

Engine = Callable[[], AbstractContextManager[Executor]]
On = str | Executor | Callable[[], Executor] | None
_FORMS = "serial, process, process:N, ray, ray:N or module:function"
_MOST_BREAKS = 3


@dataclass(frozen=True)
class Artifact:
    """A result to make: `make(place, work, *needs, **options)` fills the folder `place`; `needs`: keys of results.

    `model`: where its model is put, None if it makes none. `files`: its other files go to the run folder.
    """

    key: str
    name: str
    make: Callable[..., None]
    needs: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Path | None = None
    files: bool = False


@dataclass(frozen=True)
class Done:
    """An artifact in the store. `found`: whether it was there before the run."""

    artifact: Artifact
    entry: Entry
    found: bool


@dataclass(eq=False)
class ArtifactError(Exception):
    """Error of one artifact, raised after all running ones have ended."""

    artifact: Artifact
    error: Exception


def drive(artifacts: Iterable[Artifact], work: Work, engine: Engine) -> Iterator[Done]:
    """Yield the artifacts that are in the store, then make the others and yield each when it is stored.

    After an error no further artifact is started. An executor whose workers died is restarted a few times.
    """
    missing = {artifact.key: artifact for artifact in artifacts}
    places = {key: place for place, key in enumerate(missing, 1)}

    def begin(artifact: Artifact) -> None:
        work.progress.begin(artifact.name, place=places[artifact.key], count=len(places))

    def end(done: Done) -> Done:
        name, seconds, place = done.artifact.name, done.entry.seconds, places[done.artifact.key]
        work.progress.end(name, place=place, count=len(places), seconds=seconds, found=done.found)
        return done

    for artifact in list(missing.values()):
        if (entry := work.store.get(artifact.key)) is not None:
            del missing[artifact.key]
            begin(artifact)
            yield end(Done(artifact, entry, found=True))
    breaks = 0
    while missing:
        try:
            with _safe_path(), engine() as executor:
                yield from map(end, _make(missing, work, executor, begin))
        except BrokenExecutor as error:
            breaks += 1
            if breaks > _MOST_BREAKS:
                raise OutputError(f"workers died {breaks} times ({error}); is there enough memory?") from error


def _make(
    missing: dict[str, Artifact], work: Work, executor: Executor, begin: Callable[[Artifact], None]
) -> Iterator[Done]:
    """Make the missing artifacts, and remove each from `missing` when it is in the store."""
    waiting = {key: missing.keys() & artifact.needs for key, artifact in missing.items()}
    running = dict[Future[Any], Artifact]()
    while waiting or running:
        ready = next((key for key, needs in waiting.items() if not needs), None)
        if ready is not None:
            del waiting[ready]
            begin(missing[ready])
            running[executor.submit(make_artifact, work, missing[ready])] = missing[ready]
        for future in wait(running, timeout=None if ready is None else 0, return_when=FIRST_COMPLETED).done:
            artifact, error = running.pop(future), future.result()
            if error is not None:
                wait([other for other in running if not other.cancel()])  # their results are for the next run
                raise ArtifactError(artifact, error)
            del missing[artifact.key]
            for needs in waiting.values():
                needs.discard(artifact.key)
            yield Done(artifact, work.entry(artifact.key), found=False)


def make_artifact(work: Work, artifact: Artifact) -> Exception | None:
    """Make one artifact in a worker; our own errors are returned, because executors wrap what is raised."""

    def fill(place: Path) -> None:
        artifact.make(place, work, *artifact.needs, **artifact.options)

    try:
        with fixed_threads(work.thread_count):  # the last digits of sums depend on it
            work.store.make(artifact.key, artifact.name, fill, progress=work.progress)
    except (OrthomergeError, OSError) as error:
        return error
    return None


class Serial(Executor):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        future.set_result(fn(*args, **kwargs))
        return future


def engine_of(on: On) -> Engine:
    """Return a context manager of the executor that `on` names, is or returns."""
    if on is None or on == "serial":
        return Serial
    if isinstance(on, Executor):
        return lambda: nullcontext(on)
    if not isinstance(on, str):
        return on
    name, colon, detail = on.partition(":")
    start = {"process": _processes, "ray": _ray}.get(name)
    if start is not None and (not colon or (detail.isdecimal() and int(detail) > 0)):
        return partial(start, int(detail) if detail else None)
    if start is not None or not name or not detail:
        raise RecipeError(f"'on' must be {_FORMS}, got {on!r}")
    return _imported(name, detail)


@contextmanager
def _processes(count: int | None) -> Iterator[Executor]:
    """Start processes on this machine, which end with the run."""
    before = set(active_children())
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        try:
            yield pool
        except BaseException:
            for child in set(active_children()) - before:
                child.terminate()
            raise


class _Ray(Executor):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        import ray

        future: Future[Any] = ray.remote(fn).remote(*args, **kwargs).future()
        return future


@contextmanager
def _ray(count: int | None) -> Iterator[Executor]:
    """Start Ray on this machine with `count` workers, or connect to the cluster at $RAY_ADDRESS."""
    try:
        import ray
    except ImportError as error:
        raise RecipeError("--on ray needs Ray: install orthomerge[ray]") from error
    with tempfile.TemporaryDirectory() as empty:
        with chdir(empty):
            ray.init(num_cpus=count, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        try:
            yield _Ray()
        finally:
            ray.shutdown()


def _imported(module: str, name: str) -> Callable[[], Executor]:
    """Import a function of a module that is installed or on PYTHONPATH; the working directory is not searched."""
    before, here = list(sys.path), os.path.realpath(".")
    python_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [path for path in before if path and (path in python_path or os.path.realpath(path) != here)]
    try:
        function: Callable[[], Executor] = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        fix = f"'on' must be {_FORMS}, and the module must be installed or on PYTHONPATH"
        raise RecipeError(f"cannot import {name!r} of {module!r}: {error}; {fix}") from error
    finally:
        sys.path[:] = before
    if not callable(function):
        raise RecipeError(f"{module}:{name} must be a function that returns an Executor, got {type(function).__name__}")
    return function


@contextmanager
def _safe_path() -> Iterator[None]:
    """Keep child processes from importing modules of the working directory."""
    before = os.environ.get("PYTHONSAFEPATH", "")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        os.environ["PYTHONSAFEPATH"] = before  # empty: as if it were not set
