"""A whole run in jobs: plan, let an executor do them, finish."""

from __future__ import annotations

import shutil
from pathlib import Path

from orthomerge.checkpoints.publish import check_room, check_target
from orthomerge.recipe import Recipe
from orthomerge.running import models
from orthomerge.running.jobs.context import MERGED
from orthomerge.running.jobs.cutting import PART, cut
from orthomerge.running.jobs.executors import executor_of
from orthomerge.running.jobs.finishing import finish_run
from orthomerge.running.jobs.plan import FILE, Plan, write_plan
from orthomerge.running.jobs.store import FOLDER, Store
from orthomerge.running.ledger import Ledger, open_ledger
from orthomerge.running.line import Ran
from orthomerge.running.watching import Silent, Watch

__all__ = ["plan_run", "run_jobs"]


def run_jobs(
    recipe: Recipe,
    text: str,
    folder: Path,
    *,
    on: str,
    force: bool = False,
    watch: Watch | None = None,
    command: str = "",
    part: int = PART,
) -> Ran:
    """Carry out a recipe in jobs. `on`: as of `executor_of`; the bytes are the same."""
    executor, watch = executor_of(on), watch or Silent()
    plan = plan_run(recipe, text, folder, force=force, command=command, part=part)
    executor.map(folder, [job for job in plan.jobs if job.kind != "finish"], watch)
    Store(folder).keep(plan.by_key)  # workers that were killed may have left something
    return finish_run(folder, plan, watch=watch, force=force)


def plan_run(
    recipe: Recipe, text: str, folder: Path, *, force: bool = False, command: str = "", part: int = PART
) -> Plan:
    """Write the plan of a run, and remove jobs of an earlier plan that this one does not have."""
    with open_ledger(folder, force=force) as ledger:
        plan = cut(recipe, text=text, command=command, digests=ledger.digests, part=part)
        _check_place(plan, folder, ledger, force=force)
        ledger.write()
        if force:
            shutil.rmtree(folder / FOLDER, ignore_errors=True)
        Store(folder).keep(job.key for job in plan.jobs)
        if not (folder / FILE).is_file() or _differs(folder, plan):
            write_plan(folder, plan)
    return plan


def _check_place(plan: Plan, folder: Path, ledger: Ledger, *, force: bool) -> None:
    """Refuse an output that could not be put in its place at the end, and a disk that cannot hold it."""
    places = models.places_of(plan.made_recipe(), folder)
    ours = force or ledger.owns(places.out) or ledger.relative(places.out).startswith(models.MODELS)
    inputs = [Path(path) for path in plan.inputs]
    check_target(places.out, force=ours, inputs=inputs)
    store = Store(folder)
    left = [job for kind in (*MERGED, "expert", "base") for job in plan.of(kind) if not store.is_marked(job.key)]
    check_room(folder, len(left) * plan.nbytes)


def _differs(folder: Path, plan: Plan) -> bool:
    from orthomerge.errors import OrthomergeError
    from orthomerge.running.jobs.plan import read_plan

    try:
        return read_plan(folder) != plan
    except OrthomergeError:
        return True
