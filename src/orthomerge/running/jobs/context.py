"""What a job has to work with: the plan, and where those that it needs left what they made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from orthomerge.running.jobs.job import Job
from orthomerge.running.jobs.plan import Plan
from orthomerge.running.jobs.store import Store

if TYPE_CHECKING:
    from orthomerge.planning import Job as Merge
    from orthomerge.recipe import Recipe
    from orthomerge.running.models import Places

__all__ = ["MERGED", "MODEL", "Context", "places_of"]

MODEL = "model"  # the output folder inside a job's folder
MERGED = ("assemble", "fit", "merge")  # the kinds of which a plan has one, whose model is the merge


@dataclass(frozen=True)
class Context:
    """One job of one run."""

    run: Path
    plan: Plan
    job: Job

    @cached_property
    def recipe(self) -> Recipe:
        return self.plan.made_recipe()

    @property
    def store(self) -> Store:
        return Store(self.run)

    @cached_property
    def places(self) -> Places:
        """Where the models are that jobs made."""
        return places_of(self.plan, self.store)

    def needed(self, kind: str) -> list[Path]:
        """The folders of the jobs of one kind that this one needs, in order."""
        needs = (self.plan.by_key[key] for key in self.job.needs)
        return [self.store.place(need.key) for need in needs if need.kind == kind]

    def merge_job(self) -> Merge:
        """The merge, opened and checked; its inputs must be those that were planned."""
        from dataclasses import replace

        from orthomerge.planning import make_plan

        job = make_plan(replace(self.recipe.merging, align=None)).check()
        self.plan.check_inputs(file.path for source in job.sources.values() for file in source.files)
        return job

    def check_data(self, sources: Iterable[object]) -> None:
        """Refuse data files that have changed since they were planned."""
        self.plan.check_inputs(
            Path(source) for source in sources if isinstance(source, str) and source in self.plan.inputs
        )


def places_of(plan: Plan, store: Store) -> Places:
    """Where the models of a run are, as jobs made them."""
    from orthomerge.running.models import Places

    def model(key: str) -> Path:
        return store.place(key) / MODEL

    merged = next(model(job.key) for kind in MERGED for job in plan.of(kind))
    aligned, base = (next((model(job.key) for job in plan.of(kind)), None) for kind in ("align", "base"))
    scored = (plan.recipe.get("evaluate") or {}).get("data", {})
    experts = {str(job.spec["task"]): model(job.key) for job in plan.of("expert")}
    return Places(merged, aligned, base, {task: experts[task] for task in scored})
