"""RUN/plan.json: the jobs of a run in an order in which they can be done, and the recipe that they are cut from.

A worker needs nothing else but the inputs themselves. It refuses a plan of another version, and inputs that are not
those that were planned.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.errors import CheckpointError, RecipeError
from orthomerge.records import write_whole
from orthomerge.running.jobs.job import Job
from orthomerge.strict import build
from orthomerge.version import VERSION

if TYPE_CHECKING:
    from orthomerge.checkpoints.files import RawFile
    from orthomerge.recipe import Recipe

__all__ = ["FILE", "Input", "Plan", "read_plan", "write_plan"]

FILE = "plan.json"
_FORMAT = 1
_AGAIN = "plan again with `orthomerge run RECIPE --run {run} --plan-only`"


@dataclass(frozen=True)
class Input:
    """A file as it was when the run was planned; `modified` in nanoseconds."""

    size: int
    modified: int
    digest: str


@dataclass(frozen=True)
class Plan:
    """`recipe`: as plain data, paths absolute. `text` and `command`: what the report shows. `inputs`: by path.

    `nbytes`: of the merged encoder.
    """

    jobs: tuple[Job, ...] = ()
    recipe: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    command: str = ""
    inputs: dict[str, Input] = field(default_factory=dict)
    nbytes: int = 0
    version: str = VERSION
    format: int = _FORMAT

    @cached_property
    def by_key(self) -> dict[str, Job]:
        return {job.key: job for job in self.jobs}

    def of(self, kind: str, **spec: Any) -> Iterator[Job]:
        """The jobs of a kind whose specs say this."""
        for job in self.jobs:
            if job.kind == kind and all(job.spec.get(name) == value for name, value in spec.items()):
                yield job

    def made_recipe(self) -> Recipe:
        """The recipe as a `Recipe`."""
        from orthomerge.recipe import Recipe

        return build(Recipe, self.recipe, where=f"{FILE}: 'recipe'")

    def digest(self, file: RawFile) -> str:
        """The hash of an input, which was read when the run was planned and must not have changed since."""
        self.check_inputs([file.path])
        return self.inputs[str(file.path)].digest

    def check_inputs(self, paths: Iterable[Path]) -> None:
        """Refuse files that are not what was planned, by size and time of change."""
        for path in paths:
            known = self.inputs.get(str(path))
            try:
                status = path.stat()
            except OSError as error:
                raise CheckpointError(f"cannot read {path}: {error.strerror}; it was there when planned") from error
            if known is None or (status.st_size, status.st_mtime_ns) != (known.size, known.modified):
                raise CheckpointError(
                    f"{path} is not the file that this run was planned with; bring it back, or plan again with "
                    "`orthomerge run RECIPE --plan-only`"
                )


def write_plan(run: Path, plan: Plan) -> None:
    """Whole or not at all."""
    write_whole(run / FILE, json.dumps(asdict(plan), ensure_ascii=False) + "\n")


def read_plan(run: Path) -> Plan:
    """The plan of a run folder; read once as long as nobody writes it anew."""
    path = run / FILE
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(
            f"{run} has no plan ({FILE}: {error.strerror}); {_AGAIN.format(run=run)}, or give another folder"
        ) from error
    return _read(path, status.st_mtime_ns, status.st_ino)


@lru_cache(maxsize=4)
def _read(path: Path, modified: int, inode: int) -> Plan:
    again = _AGAIN.format(run=path.parent)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; {again}") from error
    told = document if isinstance(document, dict) else {}
    if (found := (told.get("format"), told.get("version"))) != (_FORMAT, VERSION):
        raise CheckpointError(
            f"{path} has format and version {found}, this is {_FORMAT, VERSION}: jobs of another version may "
            f"make other bytes; {again}, or work with that version"
        )
    try:
        plan = build(Plan, document, where=str(path))
    except RecipeError as error:
        raise CheckpointError(f"{error}; {again}") from error
    seen: set[str] = set()
    for job in plan.jobs:
        if missing := [need for need in job.needs if need not in seen]:
            raise CheckpointError(f"{path}: job {job.title!r} needs {missing[0][:12]}, which is not before it; {again}")
        seen.add(job.key)
    return plan
