"""A sweep: a loop over its models, each merged and scored in memory; then tables and a report.

RUN/records.jsonl, predictions/, comparisons.json, notes.json, table.md, run.json, report.html    as of `orthomerge run`
RUN/validation.jsonl     the same on val, if the best is chosen there
RUN/sweep.csv, sweep.md  every cell, the best for each budget of inputs, and what failed
RUN/scores/NAME.json     the scores of one model, by which a repeated sweep knows that it is done
RUN/merges/NAME          the merges, with `keep: true`; else no model is written
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from orthomerge.api.recipes import carry_out, input_paths
from orthomerge.core.errors import OrthomergeError, OutputError
from orthomerge.core.schema import build
from orthomerge.core.threads import fixed_threads
from orthomerge.core.version import VERSION
from orthomerge.evaluation.notes import contamination_notes
from orthomerge.evaluation.records import Record, write_records, write_whole
from orthomerge.evaluation.run_info import FILE as INFO
from orthomerge.evaluation.run_info import RunInfo, write_info
from orthomerge.evaluation.running import Run, compare_run, put_records, write_derived
from orthomerge.evaluation.tables import lines
from orthomerge.files.ownership import LOCAL, MANIFEST, why_not_ours
from orthomerge.files.publish import check_room
from orthomerge.files.removal import remove_empty, remove_tree
from orthomerge.files.run_folder import claim, drop
from orthomerge.merging.merged import DTYPE_NAMES
from orthomerge.models.experts import Experts
from orthomerge.models.model import Model
from orthomerge.models.modules import loaded
from orthomerge.models.writing import write_model
from orthomerge.runs.blocks import Report
from orthomerge.runs.digests import digest_of, output_files
from orthomerge.runs.evaluation import written_files
from orthomerge.runs.info import machine, peak_memory, versions
from orthomerge.runs.ledger import Ledger, open_ledger
from orthomerge.runs.line import read_run_recipe
from orthomerge.runs.models import MODELS, merge_key, read_back
from orthomerge.runs.recipe import Recipe
from orthomerge.runs.sweeping.cells import (
    Cell,
    Variant,
    check_sweep,
    readouts_of,
    splits_of,
    sweep_of,
    variants_of,
)
from orthomerge.runs.sweeping.choosing import Best, Failure, Row, best_of, rows_of, sweep_csv, sweep_markdown
from orthomerge.runs.sweeping.scoring import Result, Scorer
from orthomerge.runs.watching import Silent, Watch

_STAGE, _PAGE, _VALIDATION = "sweep", "report.html", "validation.jsonl"
_MERGES = "merges"
_TABLES = ("sweep.md", "sweep.csv")
_REFERENCES = ("expert", "base")
_ODD = re.compile(r"[^A-Za-z0-9_.+=@-]+")
_LONGEST = 100  # letters of a model's name in files


@dataclass(frozen=True)
class Swept:
    """What a sweep came to. `rows`: every merge under every reading; `best`: for each budget of inputs.

    `done` and `found`: how many models were scored now, and how many had been before.
    """

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
    return check_sweep(given)[0]


def sweep(
    recipe: Recipe | str | Path,
    *,
    run: str | Path | None = None,
    force: bool = False,
    watch: Watch | None = None,
    command: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> Swept:
    """Merge and score every cell of a recipe's block `sweep`; into `runs/NAME-sweep` for NAME.yaml, if none is given.

    `force`: do all again. A cell that fails is told in `failures` and ends nothing.
    """
    if run is None and not isinstance(recipe, Recipe):
        run = Path("runs") / f"{Path(recipe).stem}-sweep"
    given, text, folder = read_run_recipe(recipe, run)
    cells, experts = check_sweep(given)
    with open_ledger(folder, force=force, kind="sweep") as ledger, fixed_threads():
        return _Sweep(given, experts, text, command, ledger, watch or Silent(), force).go(cells, say)


@dataclass(frozen=True)
class _Sweep:
    recipe: Recipe
    experts: Experts
    text: str
    command: str
    ledger: Ledger
    watch: Watch
    force: bool

    @property
    def run(self) -> Path:
        return self.ledger.run

    def go(self, cells: Sequence[Cell], say: Callable[[str], None]) -> Swept:
        """Score what is not scored yet, then write what people read."""
        block, scored = sweep_of(self.recipe)
        splits = splits_of(block, scored)
        models, keys = self._models(), self._keys(splits)
        kept = [f"{_STAGE} keeps {name}" for name in models if block.keep and name not in _REFERENCES]
        self._remove_merges(kept)
        self.ledger.keep([_STAGE, *(f"{_STAGE} {name}" for name in models), *kept], models=MODELS)
        self.ledger.write()
        missing = [name for name in models if self.force or not self._is_scored(name, keys[name], kept)]
        self._check_room(len(cells), models, missing, say)
        scorer = Scorer(self.recipe, self.experts, self.run, splits, self.watch)
        for place, name in enumerate(missing, 1):
            self.watch.begin(name, place=place, count=len(missing))
            self._score(scorer, name, models[name], keys[name], keep=block.keep)
            self.watch.end(name, seconds=self.ledger.entries[f"{_STAGE} {name}"].seconds, found=False)
        results = [
            build(Result, json.loads(self._file(name).read_text(encoding="utf-8")), where=name) for name in models
        ]
        swept = self._finish(scorer, cells, results, digest_of([keys, self.text]))
        return replace(swept, done=len(missing), found=len(models) - len(missing))

    def _models(self) -> dict[str, Variant]:
        """What is scored, by names that files can have: references, then merges."""
        block, scored = sweep_of(self.recipe)
        models = dict[str, Variant]()
        if scored.references:
            models["expert"] = Variant("expert")
            if self.recipe.base is not None:
                models["base"] = Variant("base", seeds=block.seeds)
        for variant in variants_of(self.recipe):
            seed = f"-seed{variant.first}" if variant.seeds == 1 and variant.first else ""
            name = f"{_ODD.sub('-', variant.name)[:_LONGEST]}{seed}"
            models[name if name not in models else f"{name}-{digest_of(asdict(variant))[:8]}"] = variant
        return models

    def _keys(self, splits: Sequence[str]) -> dict[str, str]:
        """What the scores of each model depend on."""
        import torch

        _, scored = sweep_of(self.recipe)
        digests = self.ledger.digests
        plain = self.recipe.variant("average", {}, seed=0)
        shared = [
            {"orthomerge": VERSION, "torch": torch.__version__},
            merge_key(plain, self.experts, digests),
            [asdict(readout) for readout in readouts_of(self.recipe)],
            [splits, scored.support, scored.device, scored.batch],
            [(task, digests.source(source)) for task, source in scored.data.items()],
        ]
        models = self._models().items()
        merges = {
            name: merge_key(variant.recipe(self.recipe), self.experts, digests)
            for name, variant in models
            if name not in _REFERENCES
        }
        return {name: digest_of([shared, asdict(variant), merges.get(name)]) for name, variant in models}

    def _is_scored(self, name: str, key: str, kept: Sequence[str]) -> bool:
        own = f"{_STAGE} keeps {name}"
        return self.ledger.has(f"{_STAGE} {name}", key) and (own not in kept or self.ledger.has(own, key))

    def _remove_merges(self, kept: Sequence[str]) -> None:
        """Remove merges that an earlier sweep kept and this one does not."""
        for stage in self.ledger.entries.keys() - set(kept):
            name = stage.removeprefix(f"{_STAGE} keeps ")
            place = self.run / _MERGES / name
            if name == stage or name != place.name or place.parent.is_symlink() or not (place / MANIFEST).is_file():
                continue
            if why_not_ours(place, MANIFEST, unlisted_but_ours=(LOCAL,)) is None:
                remove_tree(place, proof=MANIFEST)
        if not kept:
            remove_empty(self.run / _MERGES)

    def _check_room(
        self, cells: int, models: Collection[str], missing: Collection[str], say: Callable[[str], None]
    ) -> None:
        """Say how much there is to do, and refuse what the disk cannot hold."""
        block, _ = sweep_of(self.recipe)
        merges = [name for name in missing if name not in _REFERENCES] if block.keep else []
        dtype = DTYPE_NAMES.get(self.recipe.dtype)
        size = len(merges) * sum(spec.cast(dtype).nbytes for spec in self.experts.specs.values())
        room = f", and {size / 1e9:.2f} GB in {self.run} for {len(merges)} models to keep" if merges else ""
        all_merges = len(set(models) - set(_REFERENCES))
        say(f"{cells} cells from {all_merges} merges; {len(missing)} models to score{room}")
        check_room(self.run, size)

    def _file(self, name: str) -> Path:
        return self.run / "scores" / f"{name}.json"

    def _score(self, scorer: Scorer, name: str, variant: Variant, key: str, *, keep: bool) -> None:
        """Score a model and note that it is done, unless something failed that may not fail again."""
        self.ledger.begin(f"{_STAGE} {name}")
        started = time.perf_counter()
        place, tasks = self.run / _MERGES / name, scorer.encoded["test"].tasks
        if name == "expert":
            result = scorer.score(variant, {task: self.experts.teacher(task) for task in tasks})
        elif name == "base":
            base = self.experts.base.with_heads(self.experts.heads)
            result = scorer.score(variant, dict.fromkeys(tasks, base))
        else:
            try:
                result = scorer.score(variant, dict.fromkeys(tasks, self._merge(variant, place if keep else None)))
            except OutputError:
                raise
            except OrthomergeError as error:
                result = scorer.failed(variant, error)
        claim(self.run, [self._file(name).relative_to(self.run).as_posix()])
        self._file(name).parent.mkdir(exist_ok=True)
        write_whole(self._file(name), json.dumps(asdict(result), ensure_ascii=False) + "\n")
        predictions = [self.run / record.predictions for record in result.records if record.predictions is not None]
        files = {path: self.ledger.digests.file(path) for path in (self._file(name), *predictions)}
        final = all(failure.lasting for failure in result.failures)
        seconds, memory = time.perf_counter() - started, peak_memory()
        if keep and name not in _REFERENCES and (place / MANIFEST).is_file():
            self.ledger.add(f"{_STAGE} keeps {name}", key, output_files(place), seconds=0.0, memory=memory)
        self.ledger.add(f"{_STAGE} {name}", key if final else "", files, seconds=seconds, memory=memory)

    def _merge(self, variant: Variant, place: Path | None) -> Model:
        """Merge or fit now; `place`: where the model is kept."""
        self.watch.stage("merging", None)
        recipe = variant.recipe(self.recipe)
        model = carry_out(recipe, experts=self.experts, progress=self.watch)
        if place is not None:
            write_model(model, place, force=True, max_shard_size=recipe.max_shard_size, inputs=input_paths(recipe))
            return read_back(place, self.experts)
        loaded(model.encoder)  # computes the weights, which are then kept while the model is scored
        return model

    def _finish(self, scorer: Scorer, cells: Sequence[Cell], results: Sequence[Result], key: str) -> Swept:
        """Everything that comes after the scores; where nothing is new, it is only told."""
        records = [record for result in results for record in result.records]
        validation = [record for result in results for record in result.validation]
        failures = [failure for result in results for failure in result.failures]
        rows = rows_of(cells, records, validation, failures)
        failed = {(failure.name, failure.way) for failure in failures}
        whole = [record for record in records if (record.method, record.way) not in failed]
        page = self.run / _PAGE if self.recipe.report is not False and whole else None
        swept = Swept(self.run, len(cells), rows, best_of(rows), failures, page=page)
        if not self.force and self.ledger.has(_STAGE, key):
            return swept
        self.ledger.begin(_STAGE)
        started = time.perf_counter()
        facts = tuple(result.facts for result in results if result.facts)
        files = self._write(swept, whole, validation, contamination_notes(scorer.encoded["test"]), facts)
        digests = {path: self.ledger.digests.file(path) for path in files}
        self.ledger.add(_STAGE, key, digests, seconds=time.perf_counter() - started, memory=peak_memory())
        return swept

    def _write(
        self,
        swept: Swept,
        records: Sequence[Record],
        validation: Sequence[Record],
        notes: Sequence[str],
        facts: tuple[dict[str, Any], ...],
    ) -> list[Path]:
        """Every file of the run folder, in an order in which nobody finds what does not belong together."""
        _, scored = sweep_of(self.recipe)
        claim(self.run, (_VALIDATION, INFO, *_TABLES))
        drop(self.run, _TABLES)
        put_records(self.run, records, {})
        claim(self.run, _TABLES)
        write_records(self.run / _VALIDATION, validation)
        against = scored.against if any(record.method == scored.against for record in records) else None
        comparisons = compare_run(self.run, against=against, margin=scored.margin / 100)
        notes = [*notes, *_own_notes(swept)]
        write_derived(self.run, Run(list(records), comparisons, notes))
        write_whole(self.run / "sweep.csv", sweep_csv(swept.rows, swept.best, list(scored.data)))
        markdown = sweep_markdown(swept.rows, swept.best, swept.failures, _references(records))
        write_whole(self.run / "sweep.md", markdown)
        entries = [entry for name, entry in self.ledger.entries.items() if name != _STAGE]
        info = RunInfo(
            command=self.command,
            recipe=self.text,
            started=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            seconds={"scores": round(sum(entry.seconds for entry in entries), 3)},
            memory=max(entry.memory for entry in entries),
            machine=machine(),
            versions=versions(),
            manifests=facts,
        )
        write_info(self.run / INFO, info)
        names = (_VALIDATION, *_TABLES, INFO)
        files = [*written_files(self.run, list(records)), *(self.run / name for name in names)]
        if swept.page is not None:
            from orthomerge.report.report import report

            title = self.recipe.report.title if isinstance(self.recipe.report, Report) else None
            made = report(self.run, swept.page, title=title)
            files += [made.page, *(path for path in sorted(made.files.rglob("*")) if path.is_file())]
        return files


def _own_notes(swept: Swept) -> list[str]:
    where = "sweep.md has those that validation chose" if any(item.chosen for item in swept.best) else "see sweep.md"
    told = f"{len(swept.rows)} ways to merge and read were scored on the same test inputs, so the best row of a table"
    notes = [f"{told} is the best in hindsight; {where}"]
    failed = {(failure.name, failure.way) for failure in swept.failures}
    return notes + ([f"{len(failed)} of them failed on some task and are left out; see sweep.md"] if failed else [])


def _references(records: Sequence[Record]) -> dict[str, float]:
    return {
        line.method: line.mean
        for line in lines(records)
        if line.method in ("base", "expert") and line.protocol == "current" and line.way.aligner is None
    }
