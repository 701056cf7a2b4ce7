"""One recipe from experts to the page: merge (or fit), align, evaluate, card, diagnose, report.

RUN/models/...             the models (`models.py`); the last one is at the recipe's `out` if it has one
RUN/records.jsonl, ...     what `evaluate` writes: records, predictions, comparisons, notes, tables
RUN/diagnosis.json         what `diagnose` writes
RUN/run.json               command, recipe, seconds, memory, machine, versions (`RunInfo`)
RUN/report.html, report_files/
RUN/stages.json            what is done, and with which inputs (`ledger.py`)

Stages pass values. A stage whose inputs have not changed, and whose files are what they were, is found and not done
again; so a run that was killed, or whose stage failed, goes on when it is repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Literal

from orthomerge.analysis.diagnosis import FILE as DIAGNOSIS
from orthomerge.analysis.diagnosis import write_diagnosis
from orthomerge.api.checks import check_recipe
from orthomerge.core.errors import OrthomergeError, OutputError, RecipeError
from orthomerge.core.version import VERSION
from orthomerge.evaluation.records import read_records
from orthomerge.evaluation.run_info import FILE as INFO
from orthomerge.evaluation.run_info import RunInfo, read_info, write_info
from orthomerge.files.run_folder import claim
from orthomerge.models.experts import Experts
from orthomerge.models.model import Model
from orthomerge.runs import models
from orthomerge.runs.blocks import Report
from orthomerge.runs.card import card_key, write_card
from orthomerge.runs.diagnosis import diagnose_key, diagnose_model
from orthomerge.runs.digests import digest_of, output_files
from orthomerge.runs.evaluation import RECORDS, evaluate_key, evaluate_models
from orthomerge.runs.info import machine, peak_memory, recipe_text, versions
from orthomerge.runs.ledger import Ledger, open_ledger
from orthomerge.runs.recipe import Recipe, read_recipe
from orthomerge.runs.watching import Silent, Watch

State = Literal["done", "found"]
_PAGE = "report.html"
_REPORTED = (RECORDS, "comparisons.json", "notes.json", DIAGNOSIS, INFO)


@dataclass(frozen=True)
class Ran:
    """What a run made. `out`: the last model; `stages`: whether each was done now, or found done."""

    folder: Path
    out: Path
    stages: dict[str, State]
    seconds: dict[str, float]
    page: Path | None = None


def run(
    recipe: Recipe | str | Path,
    *,
    run: str | Path | None = None,
    force: bool = False,
    watch: Watch | None = None,
    command: str = "",
) -> Ran:
    """Carry out a recipe with all its blocks in one run folder; `runs/NAME` for a file NAME.yaml, if none is given.

    `force`: do every stage again, and replace an existing output of ours at the recipe's `out`. `command`: how this was
    called, for the report.
    """
    given, text, folder = read_run_recipe(recipe, run)
    experts = checked_experts(given)
    with open_ledger(folder, force=force, kind="run") as ledger:
        ours = force or ledger.owns(models.places_of(given, folder).out)
        return _Line(given, experts, text, command, ledger, watch or Silent(), force, ours).go()


def read_run_recipe(recipe: Recipe | str | Path, run: str | Path | None) -> tuple[Recipe, str, Path]:
    """A recipe, its text, and the run folder."""
    if isinstance(recipe, Recipe):
        if run is None:
            raise RecipeError("where to? Give the run folder: run(recipe, run=...)")
        given, text, folder = recipe, recipe_text(recipe), Path(run)
    else:
        path = Path(recipe)
        given, text = read_recipe(path), path.read_text(encoding="utf-8")
        folder = Path(run) if run is not None else Path("runs") / path.stem
    return given, text, folder.expanduser()


def stages_of(recipe: Recipe) -> list[str]:
    """The names of a recipe's stages, in order."""
    scored = recipe.evaluate is not None
    wanted = {
        "merge": True,
        "align": recipe.align is not None,
        "evaluate": scored,
        "card": scored,
        "diagnose": scored and recipe.diagnose is not False,
        "report": scored and recipe.report is not False,
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]


def checked_experts(recipe: Recipe, experts: Experts | None = None) -> Experts:
    """The opened experts of a recipe, after everything that headers and names tell was checked."""
    if recipe.parameters.get("scale") == "auto":
        raise RecipeError(
            "'scale: auto' is chosen by `orthomerge merge --set scale=auto --data TASK=PATH`; give the number that it "
            "finds, or use a fitted method"
        )
    return check_recipe(recipe, experts)


@dataclass(frozen=True)
class _Line:
    recipe: Recipe
    experts: Experts
    text: str
    command: str
    ledger: Ledger
    watch: Watch
    force: bool
    ours: bool  # whether what lies at the place of the last model may be replaced
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    states: dict[str, State] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.ledger.run

    @cached_property
    def places(self) -> models.Places:
        return models.places_of(self.recipe, self.folder)

    @cached_property
    def merged(self) -> Model:
        """The merge, read back from where its stage wrote it."""
        return models.read_back(self.places.merged, self.experts)

    @cached_property
    def last(self) -> Model:
        """The last model: the merge, or the same with its heads aligned."""
        return self.merged if self.places.aligned is None else models.read_back(self.places.aligned, self.experts)

    def go(self) -> Ran:
        """Stage by stage."""
        names = stages_of(self.recipe)
        self.ledger.keep(names, models=models.MODELS)
        stages = {
            "merge": (self._merge_key, self._merge),
            "align": (self._align_key, self._align),
            "evaluate": (self._evaluate_key, self._evaluate),
            "card": (self._card_key, self._card),
            "diagnose": (self._diagnose_key, self._diagnose),
            "report": (self._report_key, self._report),
        }
        for place, name in enumerate(names, 1):
            if name == "report":  # which reads it
                self._write_info()
            self.watch.begin(name, place=place, count=len(names))
            self._step(name, *stages[name], place=place, count=len(names))
        if "report" not in names:
            self._write_info()
        seconds = {name: self.ledger.entries[name].seconds for name in names}
        return Ran(self.folder, self.places.out, self.states, seconds, self._page if "report" in names else None)

    def _merge_key(self) -> str:
        return models.merge_key(self.recipe, self.experts, self.ledger.digests)

    def _merge(self) -> Mapping[Path, str]:
        force = self._may_replace(self.places.merged)
        return models.merge_model(self.recipe, self.experts, self.places, force=force, progress=self.watch)

    def _align_key(self) -> str:
        return models.align_key(self.recipe, self.experts, self.places, self.ledger.digests)

    def _align(self) -> Mapping[Path, str]:
        force = self._may_replace(self.places.out)
        return models.align_model(self.recipe, self.experts, self.places, force=force, progress=self.watch)

    def _evaluate_key(self) -> str:
        return evaluate_key(self.recipe, self.experts, self.places, self.ledger.digests)

    def _evaluate(self) -> Mapping[Path, str]:
        scored = {model.title: model for model in (self.merged, self.last)}
        return self._hashed(evaluate_models(self.recipe, self.experts, scored, self.folder, self.watch))

    def _card_key(self) -> str:
        return card_key(self.places.out, self.last, read_records(self.folder / RECORDS))

    def _card(self) -> Mapping[Path, str]:
        files = write_card(self.places.out, self.last, read_records(self.folder / RECORDS))
        self.ledger.digests.note(output_files(self.places.out))  # they have other times now, but nobody touched them
        return self._hashed(files)

    def _diagnose_key(self) -> str:
        scores = self._evaluate_key()
        return diagnose_key(self.recipe, scores, self.ledger.digests.file(self.folder / RECORDS))

    def _diagnose(self) -> Mapping[Path, str]:
        records = read_records(self.folder / RECORDS)
        diagnosis = diagnose_model(
            self.recipe, self.merged, self.experts, records, at=self.places.merged, progress=self.watch
        )
        claim(self.folder, [DIAGNOSIS])
        write_diagnosis(self.folder / DIAGNOSIS, diagnosis)
        return self._hashed([self.folder / DIAGNOSIS])

    def _step(
        self, name: str, key_of: Callable[[], str], do: Callable[[], Mapping[Path, str]], *, place: int, count: int
    ) -> None:
        """Find one stage done, or do it; an error says what is kept and how to go on."""
        try:
            key = key_of()
            if not self.force and self.ledger.has(name, key):
                self.states[name] = "found"
            else:
                self.ledger.begin(name)
                started = time.perf_counter()
                files = do()
                seconds = time.perf_counter() - started
                self.ledger.add(name, key, files, seconds=seconds, memory=peak_memory())
                self.states[name] = "done"
        except OrthomergeError as error:
            raise type(error)(self._told(name, str(error), place, count)) from error
        except OSError as error:
            what = f"cannot write to {self.folder}: {error.strerror or error}"
            raise OutputError(self._told(name, what, place, count)) from error
        self.watch.end(name, seconds=self.ledger.entries[name].seconds, found=self.states[name] == "found")

    def _told(self, name: str, what: str, place: int, count: int) -> str:
        kept = ", ".join(self.states)
        return (
            f"stage {place} of {count}, {name!r}, failed: {what}\n"
            + (f"What was done before is kept in {self.folder}: {kept}. " if kept else "")
            + f"Put it right and run the same command again{', without --force' if self.force and kept else ''}"
            + (f": it goes on with {name!r}." if kept else ".")
        )

    def _may_replace(self, out: Path) -> bool:
        """Whether a model may take the place of another: among the run's own models it may."""
        return self.ours or self.ledger.relative(out).startswith(models.MODELS)

    def _hashed(self, paths: Iterable[Path]) -> dict[Path, str]:
        return {path: self.ledger.digests.file(path) for path in paths}

    def _report_key(self) -> str:
        files = [self.folder / name for name in _REPORTED]
        found = {path.name: self.ledger.digests.file(path) for path in files if path.is_file()}
        return digest_of([VERSION, found, self._title, models.output_digest(self.places.out)])

    @property
    def _title(self) -> str | None:
        return self.recipe.report.title if isinstance(self.recipe.report, Report) else None

    @property
    def _page(self) -> Path:
        return self.folder / _PAGE

    def _report(self) -> Mapping[Path, str]:
        from orthomerge.report.report import report

        written = report(self.folder, self._page, title=self._title, say=lambda text: self.watch.stage(text, None))
        figures = (path for path in sorted(written.files.rglob("*")) if path.is_file())
        return self._hashed([written.page, *figures])

    def _write_info(self) -> None:
        """Say how the run was made; where nothing is new, what was said before stands."""
        path = self.folder / INFO
        entries = {name: self.ledger.entries[name] for name in self.states if name != "report"}
        outputs = [place for place in (self.places.merged, self.places.aligned) if place is not None]
        info = RunInfo(
            command=self.command,
            recipe=self.text,
            started=f"{self.started:%Y-%m-%dT%H:%M:%SZ}",
            seconds={name: round(entry.seconds, 3) for name, entry in entries.items()},
            memory=max(entry.memory for entry in entries.values()),
            machine=machine(),
            versions=versions(),
            manifests=tuple(self.ledger.relative(output) for output in outputs),
        )
        with suppress(OrthomergeError):  # there is none, or it is damaged
            before = read_info(path)
            if (before.recipe, before.seconds, before.manifests) == (info.recipe, info.seconds, info.manifests):
                return
        claim(self.folder, [INFO])
        write_info(path, info)
