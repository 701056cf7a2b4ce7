"""Artifacts of a run, each made when all that it needs is there, on any `concurrent.futures.Executor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orthomerge.core.errors import OrthomergeError, OutputError
from orthomerge.core.progress import Watch
from orthomerge.runs.engines import Engine
from orthomerge.runs.store import Entry
from orthomerge.runs.work import Work

_MOST_BREAKS = 3


@dataclass(frozen=True)
class Artifact:
    """A result that can be made. `make(place, work, **arguments)`: a function of a module, with plain arguments, that
    fills the folder `place`. `needs`: keys of results that it reads.

    `model`: where the model that it makes as `place/model` is put; None if it makes none. `files`: whether its files
    are put into the run folder.
    """

    key: str
    name: str
    make: Callable[..., None]
    needs: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    model: Path | None = None
    files: bool = False


@dataclass(frozen=True)
class Done:
    """An artifact that is in the store. `found`: whether it was there before."""

    artifact: Artifact
    entry: Entry
    found: bool


class ArtifactError(Exception):
    """The error of an artifact, after all that was under way has ended."""

    def __init__(self, artifact: Artifact, error: Exception) -> None:
        super().__init__(str(error))
        self.artifact, self.error = artifact, error


def drive(artifacts: Iterable[Artifact], work: Work, engine: Engine, watch: Watch) -> Iterator[Done]:
    """Make every artifact that is not in the store, and yield each when it is there; what is found comes first.

    After an error nothing more is begun. An executor whose workers died is started anew a few times: what they had
    finished is in the store.
    """
    artifacts = tuple(artifacts)
    places = {artifact.key: place for place, artifact in enumerate(artifacts, 1)}
    missing = {artifact.key: artifact for artifact in artifacts}

    def begin(artifact: Artifact) -> None:
        watch.begin(artifact.name, place=places[artifact.key], count=len(places))

    def end(done: Done) -> None:
        name, seconds, place = done.artifact.name, done.entry.seconds, places[done.artifact.key]
        watch.end(name, place=place, count=len(places), seconds=seconds, found=done.found)

    for artifact in artifacts:
        if (entry := work.store.get(artifact.key)) is not None:
            del missing[artifact.key]
            begin(artifact)
            done = Done(artifact, entry, found=True)
            yield done
            end(done)
    breaks = 0
    while missing:
        try:
            with engine() as executor:
                for done in _make(missing, work, executor, begin):
                    yield done
                    end(done)
        except BrokenExecutor as error:
            breaks += 1
            if breaks > _MOST_BREAKS:
                raise OutputError(f"workers died {breaks} times ({error}); is there enough memory?") from error


def _make(
    missing: dict[str, Artifact], work: Work, executor: Executor, begin: Callable[[Artifact], None]
) -> Iterator[Done]:
    """Make what is missing; what is there is removed from `missing`."""
    waiting = {key: missing.keys() & artifact.needs for key, artifact in missing.items()}
    running = dict[Future[Any], str]()
    failure: ArtifactError | None = None
    while waiting or running:
        ready = next((key for key, needs in waiting.items() if not needs), None)
        if ready is not None:
            del waiting[ready]
            begin(missing[ready])
            running[executor.submit(make_artifact, work, missing[ready])] = ready
        for future in wait(running, timeout=None if ready is None else 0, return_when=FIRST_COMPLETED).done:
            key = running.pop(future)
            artifact, error, entry = missing[key], future.result(), work.store.get(key)
            if error is not None:
                failure = failure or ArtifactError(artifact, error)
                waiting.clear()
                running = {other: name for other, name in running.items() if not other.cancel()}
                continue
            if entry is None:
                raise OutputError(f"{work.store.content(key)} is not what was written; check the disk")
            del missing[key]
            yield Done(artifact, entry, found=False)
            for needs in waiting.values():
                needs.discard(key)
    if failure is not None:
        raise failure


def make_artifact(work: Work, artifact: Artifact) -> Exception | None:
    """What a worker does; an error of ours is returned as it is, for executors wrap what is raised."""

    def fill(place: Path) -> None:
        artifact.make(place, work, **artifact.arguments)

    try:
        with work.threads():
            work.store.make(artifact.key, artifact.name, fill, progress=work.progress)
    except (OrthomergeError, OSError) as error:
        return error
    return None
