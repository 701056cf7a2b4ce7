"""Artifacts of a run, each made when all that it needs is there, on any `concurrent.futures.Executor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from orthomerge.core.errors import OrthomergeError, OutputError
from orthomerge.runs.engines import Engine
from orthomerge.runs.store import Entry, Kind
from orthomerge.runs.work import Work

_MOST_BREAKS = 3


@dataclass(frozen=True)
class Artifact:
    """A result that can be made. `make(place, work, **arguments)`: a function of a module, with plain arguments, that
    fills the folder `place`. `kind`: what it is in the run folder. `needs`: keys of results that it reads.
    """

    key: str
    name: str
    kind: Kind
    make: Callable[..., None]
    needs: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)


class Watch(Protocol):
    """Artifacts begin and end; within one, `stage` and `advance` say how far its work is."""

    def begin(self, name: str, *, place: int, count: int) -> None: ...

    def end(self, name: str, *, place: int, count: int, seconds: float, found: bool) -> None: ...

    def stage(self, title: str, total: int | None) -> None: ...

    def advance(self, count: int) -> None: ...


class Silent:
    """A watch that says nothing."""

    def begin(self, name: str, *, place: int, count: int) -> None: ...

    def end(self, name: str, *, place: int, count: int, seconds: float, found: bool) -> None: ...

    def stage(self, title: str, total: int | None) -> None: ...

    def advance(self, count: int) -> None: ...


@dataclass(frozen=True)
class Done:
    """An artifact that is in the store. `found`: whether it was there before."""

    artifact: Artifact
    entry: Entry
    found: bool


class ArtifactError(Exception):
    """The error of an artifact, after all that was under way has ended."""

    def __init__(self, artifact: Artifact, place: int, error: Exception) -> None:
        super().__init__(str(error))
        self.artifact, self.place, self.error = artifact, place, error


def drive(artifacts: Iterable[Artifact], work: Work, engine: Engine, watch: Watch) -> Iterator[Done]:
    """Make what is not in the store; what is, or was made now, is given out before anything that needs it begins.

    After an error nothing more is begun; the first in the order of artifacts is raised. An executor whose workers died
    is started anew a few times: what they had finished is found in the store.
    """
    places = {artifact.key: (place, artifact) for place, artifact in enumerate(artifacts, 1)}
    count = len(places)
    waiting = {key: set(artifact.needs) for key, (_, artifact) in places.items()}
    running = dict[Future[Any], str]()
    failures = dict[int, ArtifactError]()
    breaks = 0
    with ExitStack() as stack:
        executor = None
        while waiting or running:
            assert running or not all(waiting.values())  # noqa: S101 - else somebody needs what nobody makes
            ready = next((key for key, needs in waiting.items() if not needs), None)
            if ready is not None:
                place, artifact = places[ready]
                del waiting[ready]
                watch.begin(artifact.name, place=place, count=count)
                if (entry := work.store.get(ready)) is None:
                    executor = executor or stack.enter_context(engine())
                    running[_submitted(executor, work, artifact)] = ready
                else:
                    yield Done(artifact, entry, found=True)
                    watch.end(artifact.name, place=place, count=count, seconds=entry.seconds, found=True)
                    _release(waiting, ready)
            over = wait(running, timeout=None if ready is None else 0, return_when=FIRST_COMPLETED).done
            for future in sorted(over, key=lambda each: places[running[each]][0]):
                place, artifact = places[running.pop(future)]
                try:
                    error = future.result()
                except BrokenExecutor as broken:
                    breaks += 1
                    if breaks > _MOST_BREAKS:
                        raise OutputError(
                            f"workers died {breaks} times ({broken}); is there enough memory?"
                        ) from broken
                    waiting = {artifact.key: set(), **{key: set() for key in running.values()}, **waiting}
                    running.clear()
                    stack.close()
                    executor = None
                    break
                if error is not None:
                    failures[place] = ArtifactError(artifact, place, error)
                    waiting.clear()
                    running = {other: key for other, key in running.items() if not other.cancel()}
                    continue
                entry = work.store.get(artifact.key)
                if entry is None:
                    raise OutputError(f"{work.store.content(artifact.key)} is not what was written; check the disk")
                yield Done(artifact, entry, found=False)
                watch.end(artifact.name, place=place, count=count, seconds=entry.seconds, found=False)
                _release(waiting, artifact.key)
        if failures:
            raise failures[min(failures)]


def _submitted(executor: Executor, work: Work, artifact: Artifact) -> Future[Any]:
    try:
        return executor.submit(make_artifact, work, artifact)
    except BrokenExecutor as error:
        future = Future[Any]()
        future.set_exception(error)
        return future


def make_artifact(work: Work, artifact: Artifact) -> Exception | None:
    """What a worker does; an error of ours is given back as it is, for executors wrap what is raised."""
    try:
        with work.threads():
            work.store.make(
                artifact.key,
                artifact.name,
                artifact.kind,
                lambda place: artifact.make(place, work, **artifact.arguments),
                progress=work.progress,
            )
    except (OrthomergeError, OSError) as error:
        return error
    return None


def _release(waiting: Mapping[str, set[str]], key: str) -> None:
    for needs in waiting.values():
        needs.discard(key)
