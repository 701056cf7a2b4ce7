"""From a sweep to jobs.

sweep-base -> sweep-expert x T
sweep-merge x V;   each of these models -> sweep-encode x T -> sweep-score x T x readouts, sweep-joint
sweep-base, sweep-expert -> sweep-notes;   all -> sweep-finish

Inputs are read as the base reads them, so all that encodes or scores needs `sweep-base`, after the model.

A job's key says what it depends on and nothing else, so that a method, scale, aligner or seed more adds jobs and leaves
the others as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from orthomerge.errors import RecipeError
from orthomerge.recipe import Recipe
from orthomerge.running.digests import Digests, digest_of
from orthomerge.running.jobs.cutting import cut
from orthomerge.running.jobs.job import Job, make_job
from orthomerge.running.jobs.plan import Plan
from orthomerge.running.models import merge_key
from orthomerge.running.sweeping.cells import Readout, Variant, readouts_of, sweep_of, variants_of

if TYPE_CHECKING:
    from orthomerge.blocks import Evaluate, Sweep

__all__ = ["MODELS", "cut_sweep", "readout_of", "splits_of", "variant_of"]

MODELS = ("sweep-base", "sweep-expert", "sweep-merge")  # the kinds that leave a model


def cut_sweep(recipe: Recipe, *, text: str, command: str, digests: Digests) -> Plan:
    """The plan of a sweep whose names were checked: that of one of its merges, with the jobs of all."""
    block, scored = sweep_of(recipe)
    variants = variants_of(recipe)
    one = next((variant for variant in variants if variant.fitted), variants[0])
    plan = cut(replace(one.recipe(recipe), evaluate=scored), text=text, command=command, digests=digests)
    own = ("method", "parameters", "seed", "report", "sweep")
    document = json.loads(json.dumps({name: asdict(recipe)[name] for name in own}))
    plan = replace(plan, recipe={**plan.recipe, **document})
    given = plan.made_recipe()
    base = make_job("sweep-base", inputs=merge_key(_plain(given), digests))
    jobs = _Cut(given, digests, splits_of(block, scored), base).go(variants)
    return replace(plan, jobs=tuple(jobs))


def splits_of(block: Sweep, scored: Evaluate) -> tuple[str, ...]:
    """What is scored: test, and val where the best is chosen there. Data is read for it."""
    from orthomerge.data.reading import read_task

    missing = []
    for name, source in scored.data.items():
        task = read_task(source) if isinstance(source, str) else source
        if task["test"].labels is None:
            raise RecipeError(f"the test split of {name!r} has no labels; accuracy needs them")
        if "val" not in task.splits or task["val"].labels is None or not len(task["val"]):
            missing.append(name)
    why = ""
    if missing:
        why = f"{missing[0]!r} has no labelled val split"
    elif scored.support == "val":
        why = "the val split is what the readings are fitted to ('support')"
    if block.choose == "val" and why:
        raise RecipeError(f"the best cannot be chosen on val: {why}; change that, or say 'choose: test'")
    return ("test",) if why or block.choose == "test" else ("test", "val")


def variant_of(job: Job) -> Variant:
    """What a merge's job was cut from."""
    names = ("method", "parameters", "first", "seeds", "fitted", "seen")
    return Variant(**{name: job.spec[name] for name in names})


def readout_of(job: Job) -> Readout:
    """What a score's job was cut from."""
    asked = tuple((shots, kind) for shots, kind in job.spec["asked"])
    return Readout(job.spec["protocol"], job.spec["aligner"], job.spec["options"], asked)


@dataclass(frozen=True)
class _Cut:
    recipe: Recipe
    digests: Digests
    splits: tuple[str, ...]
    base: Job
    jobs: list[Job] = field(default_factory=list)

    def go(self, variants: Sequence[Variant]) -> list[Job]:
        _, scored = sweep_of(self.recipe)
        readouts, tasks, base = readouts_of(self.recipe), list(scored.data), self.base
        self.jobs.append(base)
        experts, seen = dict[str, Job](), dict[str, Job]()
        if scored.references or any(readout.teaches for readout in readouts):
            for task in tasks:
                experts[task] = self._add("sweep-expert", {"task": task}, needs=[base])
                seen[task] = self._encode("expert", task, experts[task], readouts)
        wanted = {task: [experts[task], seen[task]] for task in experts}
        if scored.references:
            alone = [readout for readout in readouts if not readout.teaches]
            for task in tasks:
                self._scores(Variant("expert"), task, experts[task], seen[task], alone, {})
            if self.recipe.base is not None:
                block, _ = sweep_of(self.recipe)
                self._model(Variant("base", seeds=block.seeds), base, readouts, wanted)
        for variant in variants:
            key = merge_key(variant.recipe(self.recipe), self.digests)
            spec = {"name": variant.name, "first": variant.first, **asdict(variant)}
            self._model(variant, self._add("sweep-merge", spec, inputs=key), readouts, wanted)
        spec = {"tasks": tasks}
        facts = digest_of([self._data(task) for task in tasks])
        self._add("sweep-notes", spec, inputs=facts, needs=[base, *experts.values(), *seen.values()])
        after = [scored.against, scored.margin, self.splits, asdict(self.recipe)["report"]]
        leaves = [job for job in self.jobs if job.kind in ("sweep-score", "sweep-joint", "sweep-notes")]
        self._add("sweep-finish", inputs=digest_of(after), needs=leaves)
        return self.jobs

    def _model(
        self, variant: Variant, model: Job, readouts: Sequence[Readout], experts: Mapping[str, list[Job]]
    ) -> None:
        """All that is done with one model: task by task, and then all labels in one space."""
        _, scored = sweep_of(self.recipe)
        encoded = []
        for task in scored.data:
            encoded.append(self._encode(variant.name, task, model, readouts))
            self._scores(variant, task, model, encoded[-1], readouts, experts)
        spec = {"subject": variant.name, "first": variant.first}
        facts = digest_of([self._data(task) for task in scored.data])
        self._add("sweep-joint", spec, inputs=facts, needs=[model, *self._like(model), *encoded])

    def _encode(self, name: str, task: str, model: Job, readouts: Sequence[Readout]) -> Job:
        """Every split that anybody will ask for, so that no two jobs make the same features."""
        _, scored = sweep_of(self.recipe)
        fitted = any(kind == "inductive" for readout in readouts for _, kind in readout.asked)
        splits = [*self.splits, *([scored.support] if fitted and scored.support not in self.splits else [])]
        spec = {"subject": name, "task": task, "splits": splits}
        return self._add("sweep-encode", spec, inputs=self._data(task), needs=[model, *self._like(model)])

    def _like(self, model: Job) -> list[Job]:
        return [] if model is self.base else [self.base]

    def _scores(
        self,
        variant: Variant,
        task: str,
        model: Job,
        encoded: Job,
        readouts: Sequence[Readout],
        experts: Mapping[str, list[Job]],
    ) -> None:
        for readout in readouts:
            spec: dict[str, Any] = {
                "subject": variant.name,
                "task": task,
                "read": readout.title,
                "first": variant.first,
                "seeds": variant.seeds if readout.asked else 1,
                "protocol": readout.protocol,
                "aligner": readout.aligner,
                "options": dict(readout.options),
                "asked": [list(pair) for pair in readout.asked],
                "splits": list(self.splits),
                "seen": variant.seen,
            }
            needs = [model, *self._like(model), encoded, *(experts[task] if readout.teaches else [])]
            self._add("sweep-score", spec, inputs=self._data(task), needs=needs)

    def _add(
        self, kind: str, spec: Mapping[str, Any] | None = None, *, inputs: str = "", needs: Iterable[Job] = ()
    ) -> Job:
        self.jobs.append(make_job(kind, spec, inputs=inputs, needs=needs))
        return self.jobs[-1]

    def _data(self, task: str) -> str:
        """What a task's numbers depend on beside models and questions."""
        _, scored = sweep_of(self.recipe)
        options = [scored.support, scored.device, scored.batch]
        return digest_of([options, self.digests.source(scored.data[task])])


def _plain(recipe: Recipe) -> Recipe:
    """What all variants have in common, and the base under the experts' heads depends on."""
    return replace(recipe.merging, method="average", parameters={}, vector=None, seed=0, align=None, fit=None)
