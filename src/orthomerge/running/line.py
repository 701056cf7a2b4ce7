"""The whole line from one recipe: merge (or fit), align, references, evaluate, card, diagnose, report.

RUN/models/...             the outputs (`models.py`); the last of the line is at the recipe's `out` where it has one
RUN/records.jsonl, ...     what `evaluate` writes: records, predictions, comparisons, notes, tables
RUN/diagnosis.json         what `diagnose` writes
RUN/run.json               command, recipe, seconds, memory, machine, versions (`RunInfo`)
RUN/report.html, report_files/
RUN/stages.json            what is done, and with which inputs (`ledger.py`)

A stage whose inputs have not changed, and whose files are what they were, is found and not done again; so a run that
was killed, or whose stage failed, goes on when it is repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from orthomerge.analysis.diagnosis import FILE as DIAGNOSIS
from orthomerge.blocks import Report
from orthomerge.errors import OrthomergeError, OutputError, RecipeError
from orthomerge.planning import make_plan
from orthomerge.recipe import Recipe, read_recipe
from orthomerge.records import read_records
from orthomerge.runinfo import FILE as INFO
from orthomerge.runinfo import RunInfo, read_info, write_info
from orthomerge.running import models
from orthomerge.running.card import card_key, write_card
from orthomerge.running.diagnosis import diagnose_key, diagnose_model
from orthomerge.running.digests import digest_of, output_files
from orthomerge.running.evaluation import RECORDS, evaluate_key, evaluate_models
from orthomerge.running.info import machine, peak_memory, recipe_text, versions
from orthomerge.running.ledger import Ledger, open_ledger
from orthomerge.running.watching import Silent, Watch
from orthomerge.version import VERSION

__all__ = ["Ran", "check_recipe", "read_run_recipe", "run", "stages_of"]

State = Literal["done", "found"]
_PAGE = "report.html"
_REPORTED = (RECORDS, "comparisons.json", "notes.json", DIAGNOSIS, INFO)


@dataclass(frozen=True)
class Ran:
    """What a run made. `out`: the model at the end of the line; `stages`: whether each was done now, or found done."""

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
    check_recipe(given)
    with open_ledger(folder, force=force) as ledger:
        return _Line(given, text, command, ledger, watch or Silent(), force).go()


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
        "references": scored,
        "evaluate": scored,
        "card": scored,
        "diagnose": scored and recipe.diagnose is not False,
        "report": scored and recipe.report is not False,
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]


def check_recipe(recipe: Recipe) -> None:
    """All that can be told before anything is done."""
    if recipe.parameters.get("scale") == "auto":
        raise RecipeError(
            "'scale: auto' is chosen by `orthomerge merge --set scale=auto --data TASK=PATH`; give the number that it "
            "finds, or use a fitted method"
        )
    make_plan(recipe).check()


@dataclass(frozen=True)
class _Line:
    recipe: Recipe
    text: str
    command: str
    ledger: Ledger
    watch: Watch
    force: bool
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    states: dict[str, State] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.ledger.run

    def go(self) -> Ran:
        """Stage by stage."""
        recipe, folder, digests = self.recipe, self.folder, self.ledger.digests
        places, names = models.places_of(recipe, folder), stages_of(recipe)
        ours = self.force or self.ledger.owns(places.out)
        self.ledger.keep(names, models=models.MODELS)
        steps: dict[str, tuple[Callable[[], str], Callable[[], Mapping[Path, str]]]] = {
            "merge": (
                lambda: models.merge_key(recipe, digests),
                lambda: models.merge_model(
                    recipe, places, force=ours or self._is_inside(places.merged), progress=self.watch
                ),
            ),
            "align": (
                lambda: models.align_key(recipe, places, digests),
                lambda: models.align_model(
                    recipe, places, force=ours or self._is_inside(places.out), progress=self.watch
                ),
            ),
            "references": (
                lambda: models.references_key(recipe, places, digests),
                lambda: models.write_references(recipe, places, progress=self.watch),
            ),
            "evaluate": (
                lambda: evaluate_key(recipe, places, digests),
                lambda: self._hashed(evaluate_models(recipe, places, folder, say=self._say)),
            ),
            "card": (
                lambda: card_key(places.out, read_records(folder / RECORDS)),
                lambda: self._carded(places.out),
            ),
            "diagnose": (
                lambda: diagnose_key(recipe, places, folder, digests),
                lambda: self._hashed(diagnose_model(recipe, places, folder, say=self._say)),
            ),
            "report": (lambda: self._report_key(places), lambda: self._hashed(self._report())),
        }
        for place, name in enumerate(names, 1):
            if name == "report":  # which reads it
                self._write_info(places)
            self.watch.begin(name, place=place, count=len(names))
            self._step(name, *steps[name], place=place, count=len(names))
        if "report" not in names:
            self._write_info(places)
        seconds = {name: self.ledger.entries[name].seconds for name in names}
        return Ran(folder, places.out, self.states, seconds, folder / _PAGE if "report" in names else None)

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

    def _is_inside(self, out: Path) -> bool:
        """Whether an output is among the run's models, and so may be replaced."""
        return self.ledger.relative(out).startswith(models.MODELS)

    def _say(self, text: str) -> None:
        self.watch.stage(text, None)

    def _hashed(self, paths: Iterable[Path]) -> dict[Path, str]:
        return {path: self.ledger.digests.file(path) for path in paths}

    def _carded(self, out: Path) -> dict[Path, str]:
        files = write_card(out, read_records(self.folder / RECORDS))
        self.ledger.digests.note(output_files(out))  # they have other times now, but nobody touched them
        return self._hashed(files)

    def _report_key(self, places: models.Places) -> str:
        files = [self.folder / name for name in _REPORTED]
        found = {path.name: self.ledger.digests.file(path) for path in files if path.is_file()}
        return digest_of([VERSION, found, self._title, models.output_digest(places.out)])

    @property
    def _title(self) -> str | None:
        return self.recipe.report.title if isinstance(self.recipe.report, Report) else None

    def _report(self) -> list[Path]:
        from orthomerge.report.report import report

        made = report(self.folder, self.folder / _PAGE, title=self._title, say=self._say)
        return [made.page, *(path for path in sorted(made.files.rglob("*")) if path.is_file())]

    def _write_info(self, places: models.Places) -> None:
        """Say how the run was made; where nothing is new, what was said before stands."""
        path = self.folder / INFO
        entries = {name: self.ledger.entries[name] for name in self.states if name != "report"}
        outputs = [places.merged] if places.aligned is None else [places.merged, places.aligned]
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
        write_info(path, info)
