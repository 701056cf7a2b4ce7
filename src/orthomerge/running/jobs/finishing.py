"""From what jobs made to a run folder: the line of stages, its models and records taken from the jobs' folders.

Afterwards the folder is as if `orthomerge run` had done everything by itself, and would find everything done.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orthomerge.checkpoints.publish import publish
from orthomerge.errors import OutputError
from orthomerge.evaluation.comparisons import compare_run
from orthomerge.evaluation.notes import contamination_notes
from orthomerge.evaluation.running import Run
from orthomerge.output import link_files
from orthomerge.recipe import Recipe
from orthomerge.records import Record, read_records, write_records, write_whole
from orthomerge.running.digests import output_files
from orthomerge.running.evaluation import RECORDS, bench_of, written_files
from orthomerge.running.jobs.context import places_of
from orthomerge.running.jobs.kinds.table import KINDS
from orthomerge.running.jobs.plan import Plan
from orthomerge.running.jobs.questions import asked, in_order
from orthomerge.running.jobs.store import Store
from orthomerge.running.ledger import Ledger, open_ledger
from orthomerge.running.line import Makers, Ran, carry_out
from orthomerge.running.models import Places
from orthomerge.running.watching import Watch

__all__ = ["finish_run", "waiting_ledger"]

_PATIENCE = 600.0  # seconds to wait for another worker that finishes the same run


def finish_run(run: Path, plan: Plan, *, watch: Watch | None = None, force: bool = False) -> Ran:
    """Put everything into its place and do what comes after; what is in its place already stays."""
    given = _Given(plan, Store(run))
    makers = Makers(given.merge, given.align, given.references, given.evaluate, given.spent)
    with waiting_ledger(run) as ledger:
        recipe = plan.made_recipe()
        return carry_out(recipe, plan.text, plan.command, ledger, watch=watch, force=force, makers=makers)


@contextmanager
def waiting_ledger(run: Path) -> Iterator[Ledger]:
    """The ledger, once nobody else is at it."""
    until = time.monotonic() + _PATIENCE
    while True:
        opened = open_ledger(run)
        try:
            ledger = opened.__enter__()
            break
        except OutputError as error:
            if "another run is at work" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.2)
    try:
        yield ledger
    finally:
        opened.__exit__(None, None, None)


@dataclass(frozen=True)
class _Given:
    """Makers that take what jobs made."""

    plan: Plan
    store: Store

    @property
    def made(self) -> Places:
        return places_of(self.plan, self.store)

    def merge(self, recipe: Recipe, places: Places, *, force: bool, progress: object) -> dict[Path, str]:
        return _put(self.made.merged, places.merged, force=force)

    def align(self, recipe: Recipe, places: Places, *, force: bool, progress: object) -> dict[Path, str]:
        if self.made.aligned is None or places.aligned is None:
            raise AssertionError("a recipe with a block 'align' has an aligned output")
        return _put(self.made.aligned, places.aligned, force=force)

    def references(self, recipe: Recipe, places: Places, *, progress: object) -> dict[Path, str]:
        files = dict[Path, str]()
        for task, out in places.experts.items():
            files |= _put(self.made.experts[task], out, force=True)
        if self.made.base is not None and places.base is not None:
            files |= _put(self.made.base, places.base, force=True)
        return files

    def evaluate(self, recipe: Recipe, places: Places, run: Path, *, say: Any) -> list[Path]:
        block = recipe.evaluate
        if block is None:
            raise AssertionError("only a recipe with a block 'evaluate' has records")
        folders = [self.store.place(job.key) for job in self.plan.of("evaluate")]
        records = list(self._records(recipe))
        _put_records(folders, records, run)
        notes = contamination_notes(bench_of(recipe, self.made, say=say))
        comparisons = compare_run(run, against=block.against, margin=block.margin / 100)
        write_whole(run / "table.md", Run(records, comparisons, notes).markdown() + "\n")
        _write_json(run / "comparisons.json", [asdict(comparison) for comparison in comparisons])
        _write_json(run / "notes.json", notes)
        return written_files(run, records)

    def _records(self, recipe: Recipe) -> Iterator[Record]:
        """In the order of a run that is not cut."""
        rows: dict[tuple[str, str], list[list[Record]]] = {}
        for job in self.plan.of("evaluate"):
            found = read_records(self.store.place(job.key) / RECORDS)
            rows.setdefault((job.spec["subject"], job.spec["task"]), []).append(found)
        for (role, task), by_seed in rows.items():
            yield from in_order(asked(recipe, role), by_seed) if task else by_seed[0]

    def spent(self, stage: str) -> float:
        """Seconds that the jobs of a stage took, all workers together."""
        keys = [job.key for job in self.plan.jobs if KINDS[job.kind].stage == stage and job.kind != "finish"]
        return sum(done.seconds for key in keys if (done := self.store.found(key)) is not None)


def _put(made: Path, place: Path, *, force: bool) -> dict[Path, str]:
    """An output where the run keeps it: the same files by hard links where that can be."""
    with publish(place, force=force) as partial:
        names = (path.relative_to(made).as_posix() for path in sorted(made.rglob("*")) if path.is_file())
        link_files(made, partial, names)
    return output_files(place)


def _put_records(folders: Iterable[Path], records: list[Record], run: Path) -> None:
    """Predictions first, then the records that name them; whatever was derived from others is gone meanwhile."""
    target = run / "predictions"
    target.mkdir(exist_ok=True)
    for folder in folders:
        for path in sorted((folder / "predictions").glob("*.npz")):
            (target / path.name).unlink(missing_ok=True)
            link_files(folder / "predictions", target, [path.name])
    for derived in ("notes.json", "comparisons.json", "table.md"):
        (run / derived).unlink(missing_ok=True)
    write_records(run / RECORDS, records)


def _write_json(path: Path, document: object) -> None:
    write_whole(path, json.dumps(document, indent=2, ensure_ascii=False) + "\n")
