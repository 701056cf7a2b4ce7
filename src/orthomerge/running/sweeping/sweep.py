"""A sweep from its recipe to its report: check, plan, let an executor do the jobs, finish.

What is done is not done again: a sweep that was killed goes on, and one whose recipe has grown does what is new. Cells
that failed by their own numbers would fail again and are not tried; what failed for want of memory, say, is. Merged
models are kept while anything needs them, and then removed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from orthomerge.checkpoints.publish import check_room
from orthomerge.errors import OutputError
from orthomerge.output import link_files
from orthomerge.recipe import Recipe
from orthomerge.running.jobs.context import MODEL
from orthomerge.running.jobs.executors import executor_of
from orthomerge.running.jobs.finishing import waiting_ledger
from orthomerge.running.jobs.job import Job
from orthomerge.running.jobs.kinds.sweep_models import may_pass
from orthomerge.running.jobs.plan import FILE, Plan, write_plan
from orthomerge.running.jobs.store import FOLDER, Store
from orthomerge.running.ledger import open_ledger
from orthomerge.running.line import read_run_recipe
from orthomerge.running.sweeping.cells import Cell, check_sweep, sweep_of
from orthomerge.running.sweeping.choosing import Best, Failure, Row
from orthomerge.running.sweeping.cutting import MODELS, cut_sweep, variant_of
from orthomerge.running.sweeping.finishing import finish_sweep
from orthomerge.running.watching import Silent, Watch

__all__ = ["Swept", "list_cells", "plan_sweep", "sweep"]

_KEPT, _MARKER = "merges", ".orthomerge-sweep"
_ODD = re.compile(r"[^A-Za-z0-9_.+=@-]+")
_LONGEST = 100  # letters of a folder's name


@dataclass(frozen=True)
class Swept:
    """What a sweep came to. `rows`: every merge under every reading; `best`: for each budget of inputs."""

    folder: Path
    cells: int
    rows: list[Row]
    best: list[Best]
    failures: list[Failure] = field(default_factory=list)
    done: int = 0
    found: int = 0
    page: Path | None = None


def list_cells(recipe: Recipe | str | Path) -> list[Cell]:
    """The cells of a sweep, checked; nothing is done."""
    given, _, _ = read_run_recipe(recipe, "." if isinstance(recipe, Recipe) else None)
    return check_sweep(given)


def sweep(
    recipe: Recipe | str | Path,
    *,
    run: str | Path | None = None,
    on: str = "serial",
    force: bool = False,
    watch: Watch | None = None,
    command: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> Swept:
    """Merge and score every cell of a recipe's block `sweep`; into `runs/NAME-sweep` for NAME.yaml, if none is given.

    `on`: who does the jobs: serial, process:N, ray, ray:N or ray://host:port; the numbers are the same. `force`: do all
    again. A cell that fails is told in `failures` and ends nothing.
    """
    executor = executor_of(on)
    given, text, folder = _read(recipe, run)
    cells = check_sweep(given)
    plan = _plan(given, text, folder, command=command, force=force)
    store = Store(folder)
    jobs, missing = _wanted(plan, store)
    _tell(plan, folder, len(cells), missing, say)
    executor.map(folder, jobs, watch or Silent())
    with waiting_ledger(folder) as ledger:
        made = finish_sweep(plan, ledger)
    block, _ = sweep_of(given)
    _clear(folder / _KEPT)
    if block.keep:
        _put_models(plan, store)
    store.keep(job.key for job in plan.jobs if block.keep or job.kind not in MODELS)
    counts = (len(missing), len(jobs) - len(missing))
    return Swept(folder, len(cells), made.rows, made.best, made.failures, *counts, made.page)


def plan_sweep(recipe: Recipe | str | Path, *, run: str | Path | None = None, force: bool = False) -> tuple[Path, Plan]:
    """Only write the plan of a sweep, for `orthomerge work`; the folder and the plan."""
    given, text, folder = _read(recipe, run)
    check_sweep(given)
    return folder, _plan(given, text, folder, command="", force=force)


def _read(recipe: Recipe | str | Path, run: str | Path | None) -> tuple[Recipe, str, Path]:
    if run is None and not isinstance(recipe, Recipe):
        run = Path("runs") / f"{Path(recipe).stem}-sweep"
    return read_run_recipe(recipe, run)


def _plan(recipe: Recipe, text: str, folder: Path, *, command: str, force: bool) -> Plan:
    """Write the plan, and remove what it does not have any more, and what failed but may not fail again."""
    with open_ledger(folder, force=force) as ledger:
        _check_folder(folder, force=force)
        plan = cut_sweep(recipe, text=text, command=command, digests=ledger.digests)
        ledger.write()
        if force:
            shutil.rmtree(folder / FOLDER, ignore_errors=True)
        store = Store(folder)
        store.keep(job.key for job in plan.jobs if not may_pass(store.place(job.key)))
        write_plan(folder, plan)
    return plan


def _check_folder(folder: Path, *, force: bool) -> None:
    """The jobs of a run that is no sweep would be removed."""
    path = folder / FILE
    if force or not path.is_file():
        return
    try:
        sweeps = bool(json.loads(path.read_text(encoding="utf-8"))["recipe"].get("sweep"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        sweeps = False
    if not sweeps:
        raise OutputError(f"{folder} holds a run that is no sweep; give another --run, or --force to replace its jobs")


def _wanted(plan: Plan, store: Store) -> tuple[list[Job], list[Job]]:
    """The jobs to look after, and those of them that are not done: whatever a number that is missing depends on."""
    done = {job.key for job in plan.jobs if store.found(job.key) is not None}
    block, _ = sweep_of(plan.made_recipe())
    passing = {*MODELS, "sweep-encode", "sweep-finish"} - ({"sweep-merge"} if block.keep else set())
    wanted = {job.key for job in plan.jobs if job.kind not in passing}
    for job in reversed(plan.jobs):  # a job comes after what it needs
        if job.key in wanted and job.key not in done:
            wanted.update(job.needs)
    jobs = [job for job in plan.jobs if job.key in wanted]
    return jobs, [job for job in jobs if job.key not in done]


def _tell(plan: Plan, folder: Path, cells: int, missing: Collection[Job], say: Callable[[str], None]) -> None:
    """Say how much there is to do, and refuse what the disk cannot hold."""
    models = sum(job.kind in MODELS for job in missing)
    size = models * plan.nbytes
    told = f"{cells} cells from {len(list(plan.of('sweep-merge')))} merges; {len(missing)} jobs to do"
    room = f", and {size / 1e9:.2f} GB in {folder} for {models} models on the way" if models else ""
    say(f"{told}{room}")
    check_room(folder, size)


def _clear(kept: Path) -> None:
    """Remove what an earlier sweep kept; whatever else has that name is not touched."""
    if (kept / _MARKER).is_file():
        shutil.rmtree(kept)


def _put_models(plan: Plan, store: Store) -> None:
    """Every merge under a name that people can read: the very same files by hard links where that can be."""
    kept = store.run / _KEPT
    if kept.exists():
        raise OutputError(f"{kept} is there already and not of a sweep; move it away, and run again")
    kept.mkdir()
    (kept / _MARKER).write_text("the next sweep here replaces this folder\n")
    for job in plan.of("sweep-merge"):
        variant, made = variant_of(job), store.place(job.key) / MODEL
        seed = f"-seed{variant.first}" if variant.seeds == 1 and variant.first else ""
        name = f"{_ODD.sub('-', variant.name)[:_LONGEST]}{seed}"
        place = kept / name
        place = place if not place.exists() else place.with_name(f"{name}-{job.key[:8]}")
        files = sorted(path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file())
        if files:
            place.mkdir()
            link_files(made, place, files)
