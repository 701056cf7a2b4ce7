"""From a recipe to jobs: a pure function of the recipe, its inputs' contents and the number of inputs in a part.

survey -> merge-shard x S -> assemble -> expert x T, base
assemble, expert -> statistics x T x P -> solve x T -> align
assemble, expert, base, align -> evaluate x models x T x seeds -> finish

What cannot be cut (a fitted merge, an adapter; an aligner that needs all features at once) is one job, or one a task.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.checkpoints.shards import plan_shards
from orthomerge.errors import RecipeError
from orthomerge.output import companions
from orthomerge.pipeline import check_tied, heads_of, task_vectors
from orthomerge.planning import make_plan
from orthomerge.recipe import Recipe, parse_size
from orthomerge.running.digests import Digests, digest_of
from orthomerge.running.jobs.job import Job, make_job
from orthomerge.running.jobs.plan import Input, Plan
from orthomerge.running.jobs.questions import asked
from orthomerge.running.models import merge_key

if TYPE_CHECKING:
    from orthomerge.blocks import Evaluate
    from orthomerge.planning import Job as Merge
    from orthomerge.recipe import Align

__all__ = ["PART", "cut"]

PART = 4096  # inputs in one part of the statistics
_READERS = 8  # files that are hashed at a time


def cut(recipe: Recipe, *, text: str, command: str = "", digests: Digests, part: int = PART) -> Plan:
    """The plan of a recipe. All that can be refused before any work is refused here."""
    if part < 1:
        raise RecipeError(f"a part of the statistics must have at least 1 input, got {part}")
    given = _absolute(recipe)
    merge = make_plan(replace(given.merging, align=None)).check()
    _check(merge)
    _hash(merge, digests)
    jobs = _Cut(given, merge, digests).go()
    inputs = _inputs(merge, given, digests)
    document = json.loads(json.dumps(asdict(given)))  # as it is read back
    return Plan(tuple(jobs), document, text, command, inputs, merge.bytes_to_write)


def _check(merge: Merge) -> None:
    """What `orthomerge.merge` refuses before it merges; a fit looks by itself."""
    if merge.recipe.fit is not None:
        return
    from orthomerge.kinship import check_kinship

    heads_of(merge)
    check_tied(merge)
    check_kinship(merge, task_vectors(merge))
    companions(*(source.path for source in merge.sources.values()))


def _hash(merge: Merge, digests: Digests) -> None:
    """Read all weights once, several files at a time: nothing else of a plan takes long."""
    paths = [file.path for source in merge.sources.values() for file in source.files]
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _READERS)) as pool:
        list(pool.map(digests.file, paths))


@dataclass(frozen=True)
class _Cut:
    recipe: Recipe
    merge: Merge
    digests: Digests
    jobs: list[Job] = field(default_factory=list)

    def go(self) -> list[Job]:
        recipe = self.recipe
        merged = self._merged()
        tasks = [task for task in recipe.tasks if task in {**_data(recipe.align), **_data(recipe.evaluate)}]
        experts = {task: self._add("expert", {"task": task}, needs=[merged]) for task in tasks}
        models = {"merged": merged}
        if recipe.align is not None:
            models["aligned"] = self._aligned(recipe.align, merged, experts)
        if recipe.evaluate is not None:
            self._evaluations(recipe.evaluate, models, experts)
        after = [recipe.out, asdict(recipe)["diagnose"], asdict(recipe)["report"]]
        self._add("finish", inputs=digest_of(after), needs=list(self.jobs))
        return self.jobs

    def _add(self, kind: str, spec: Mapping[str, Any] | None = None, *, inputs: str = "", needs: Iterable[Job]) -> Job:
        self.jobs.append(make_job(kind, spec, inputs=inputs, needs=needs))
        return self.jobs[-1]

    def _merged(self) -> Job:
        recipe, key = self.recipe, merge_key(self.recipe, self.digests)
        if recipe.fit is not None:
            return self._add("fit", inputs=key, needs=[])
        looks = [self._add("survey", inputs=key, needs=[])] if hasattr(self.merge.method, "survey") else []
        count = len(plan_shards(self.merge.specs, parse_size(recipe.max_shard_size)))
        shards = [
            self._add("merge-shard", {"shard": number, "shards": count}, inputs=key, needs=looks)
            for number in range(1, count + 1)
        ]
        return self._add("assemble", inputs=key, needs=shards)

    def _aligned(self, block: Align, merged: Job, experts: Mapping[str, Job]) -> Job:
        options = {name: value for name, value in vars(block).items() if name != "data"}
        digests = {task: digest_of([options, self.digests.source(source)]) for task, source in block.data.items()}
        solved = []
        for task, digest in digests.items():
            solved.append(self._add("solve", {"task": task}, inputs=digest, needs=[merged, experts[task]]))
        spec = {"tasks": list(block.data)}
        return self._add("align", spec, inputs=digest_of(list(digests.values())), needs=[merged, *solved])

    def _evaluations(self, block: Evaluate, models: Mapping[str, Job], experts: Mapping[str, Job]) -> None:
        """Model by model, task by task, seed by seed; and each model on all labels in one space."""
        options = {name: value for name, value in asdict(block).items() if name != "data"}
        digests = {task: digest_of([options, self.digests.source(source)]) for task, source in block.data.items()}
        merged, roles = models["merged"], dict[str, list[Job]]()
        if self.recipe.base is not None and block.references:
            roles["base"] = [self._add("base", needs=[merged])]
        if block.references:
            roles["expert"] = []
        roles |= {role: [model] for role, model in models.items()}
        for role, own in roles.items():
            seeds = max((question.seeds for question in asked(self.recipe, role)), default=1)
            for task, digest in digests.items():
                needs = [merged, experts[task], *(model for model in own if model is not merged)]
                for seed in range(seeds):  # the first makes the features, which are kept for the others
                    made = self._add(
                        "evaluate", {"subject": role, "task": task, "seed": seed}, inputs=digest, needs=needs
                    )
                    needs = needs if seed else [*needs, made]
            if len(digests) > 1:
                everyone = [experts[task] for task in digests] if role == "expert" else own
                needs = [merged, *(model for model in everyone if model is not merged)]
                whole = digest_of(list(digests.items()))
                self._add("evaluate", {"subject": role, "task": "", "seed": 0}, inputs=whole, needs=needs)


def _data(block: Align | Evaluate | None) -> Mapping[str, object]:
    return {} if block is None else block.data


def _absolute(recipe: Recipe) -> Recipe:
    """The same recipe for workers who start elsewhere: what is on disk has its whole path."""

    def path(text: str) -> str:
        found = os.path.abspath(Path(text).expanduser())
        return found if os.path.lexists(found) else text

    def source(task: str, given: object) -> str:
        if not isinstance(given, str):
            raise RecipeError(
                f"the data of {task!r} is a {type(given).__name__} in memory, which no other process can read; write "
                "it to a file, or run without `on`"
            )
        return path(given)

    changed: dict[str, Any] = {
        "experts": {task: replace(expert, path=path(expert.path)) for task, expert in recipe.tasks.items()},
        "base": None if recipe.base is None else path(recipe.base),
        "out": None if recipe.out is None else os.path.abspath(Path(recipe.out).expanduser()),
    }
    for name in ("align", "fit", "evaluate"):
        if (block := getattr(recipe, name)) is not None:
            data = {task: source(task, given) for task, given in block.data.items()}
            changed[name] = replace(block, data=data)
    return replace(recipe, **changed)


def _inputs(merge: Merge, recipe: Recipe, digests: Digests) -> dict[str, Input]:
    """Every file of weights and every file of data, as it is now."""
    weights = [file.path for held in merge.sources.values() for file in held.files]
    blocks = [block for block in (recipe.align, recipe.fit, recipe.evaluate) if block is not None]
    data = [Path(given) for block in blocks for given in block.data.values() if Path(given).is_file()]
    found = {}
    for path in (*weights, *data):
        status = path.stat()
        found[str(path)] = Input(status.st_size, status.st_mtime_ns, digests.file(path))
    return found
