"""Carry out a recipe with all its sections in one run folder.

RUN/models/...             the models; the last one is at the recipe's `out` if it has one
RUN/records.jsonl, ...     records, predictions, comparisons, notes, tables
RUN/diagnosis.json         what is lost, and why
RUN/run.json               command, recipe, seconds, memory, machine, versions (`RunInfo`)
RUN/report.html, report_files/
RUN/sweep.md, sweep.csv, validation.jsonl, merges/      of a recipe with a sweep
RUN/.store/                every result by content (`store.py`)

A result whose inputs have not changed is found in the store and not made again; so a run that was killed, or that
failed, continues when it is repeated. What the recipe does not ask for any more is removed at the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from orthomerge.core.errors import OrthomergeError, OutputError, RecipeError
from orthomerge.core.threads import fixed_threads
from orthomerge.evaluation.records import INFO, RunInfo, read_info, read_records, write_info
from orthomerge.files.publish import check_target
from orthomerge.files.run_folder import RUN, claim, drop
from orthomerge.runs.checks import check_recipe
from orthomerge.runs.driver import Artifact, ArtifactError, Done, Silent, Watch, drive
from orthomerge.runs.engines import On, engine_of
from orthomerge.runs.machine import machine, recipe_text, versions
from orthomerge.runs.models import input_paths
from orthomerge.runs.publishing import (
    is_same_model,
    own_names,
    place_files,
    place_model,
    place_page,
    place_scores,
    remove_model,
    remove_page,
)
from orthomerge.runs.recipe import Recipe, read_recipe
from orthomerge.runs.steps import PAGE, RECORDS, model_places, run_artifacts
from orthomerge.runs.sweeping.cells import check_sweep
from orthomerge.runs.sweeping.sweep import MERGES, Swept, check_space, facts_of, sweep_artifacts, swept_of
from orthomerge.runs.work import STORE, Work

State = Literal["done", "found"]


@dataclass(frozen=True)
class Ran:
    """What a run made. `out`: the last model; `stages`: whether each was done now, or found done.

    `swept`: rows and choices of a sweep, which has no last model.
    """

    folder: Path
    out: Path | None
    stages: dict[str, State]
    seconds: dict[str, float]
    page: Path | None = None
    swept: Swept | None = None


def run(
    recipe: Recipe | str | Path,
    *,
    out: str | Path | None = None,
    on: On = None,
    force: bool = False,
    watch: Watch | None = None,
    command: str = "",
) -> Ran:
    """Carry out a recipe in the run folder `out`; `runs/NAME` for a file NAME.yaml, if none is given.

    `on`: where results are made: `process:N`, `ray`, `ray:N`, `module:function`, or an `Executor`; here by default.
    `force`: do everything again, and replace an existing output of ours at the recipe's `out`. `command`: how this was
    called, for the report.
    """
    import torch

    engine = engine_of(on)
    recipe, text, folder = _read(recipe, out)
    with ExitStack() as stack:
        if recipe.sweep is None:
            experts = _checked(recipe)
        else:
            experts = check_sweep(recipe)[1]
            stack.enter_context(fixed_threads())
        _check_folder(folder, force=force)
        silent = Silent() if watch is None else watch
        if on not in (None, "serial"):
            recipe, folder = _for_others(recipe), folder.absolute()
        work = Work(recipe, text, folder, torch.get_num_threads(), progress=silent)
        work.__dict__["experts"] = experts
        return _Run(work, command, silent, force).go(engine)


def _read(recipe: Recipe | str | Path, out: str | Path | None) -> tuple[Recipe, str, Path]:
    """A recipe, its text, and the run folder."""
    if isinstance(recipe, Recipe):
        if out is None:
            raise RecipeError("where to? Give the run folder: run(recipe, out=...)")
        return recipe, recipe_text(recipe), Path(out).expanduser()
    path = Path(recipe)
    folder = Path("runs") / path.stem if out is None else Path(out).expanduser()
    return read_recipe(path), path.read_text(encoding="utf-8"), folder


def _checked(recipe: Recipe) -> Any:
    """The opened experts of a recipe, after everything that headers and names tell was checked."""
    if recipe.parameters.get("scale") == "auto":
        raise RecipeError(
            "'scale: auto' is chosen by `orthomerge merge --set scale=auto --data TASK=PATH`; give the number that it "
            "chooses, or use a fitted method"
        )
    return check_recipe(recipe)


def _check_folder(run: Path, *, force: bool) -> None:
    """Refuse a folder with other things in it, and links that lead out of it."""
    try:
        held = run.is_dir() and any(path.name != RUN for path in run.iterdir())
        if held and not (run / STORE).is_dir() and not force:
            raise OutputError(
                f"{run} is not empty and was not made by `orthomerge run` (it has no {STORE}); give another --out, or "
                "--force to write into it"
            )
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write the run to {run}: {error.strerror}; give another --out") from error
    for name in ("models", MERGES, STORE):
        if (run / name).is_symlink():
            raise OutputError(f"{run / name} is a link, and nothing is written through links; move it away")


def _for_others(recipe: Recipe) -> Recipe:
    """A recipe that other processes can carry out."""
    if not all(isinstance(source, str) for source in recipe.data):
        raise RecipeError("data in memory cannot be given to other processes; name files, or leave 'on' out")
    return recipe.absolute()


@dataclass(frozen=True)
class _Run:
    work: Work
    command: str
    watch: Watch
    force: bool
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    done: dict[str, Done] = field(default_factory=dict)  # by name

    @property
    def folder(self) -> Path:
        return self.work.run

    @property
    def kind(self) -> str:
        return "run" if self.work.recipe.sweep is None else "sweep"

    def go(self, engine: Any) -> Ran:
        """Make everything, publish each result when it is there, and remove what nobody asks for any more."""
        store, sweeps = self.work.store, self.kind == "sweep"
        claim(self.folder, [], kind=self.kind)
        artifacts = list(sweep_artifacts(self.work) if sweeps else run_artifacts(self.work))
        if not sweeps:
            self._check_out()
        if self.force:
            for entry in store.entries():
                store.remove(entry)
        if sweeps:
            self.watch.stage(check_space(self.work, artifacts), None)
        try:
            for done in drive(artifacts, self.work, engine, self.watch):
                self.done[done.artifact.name] = done
                self._publish(done)
                if len(self.done) == sum(artifact.kind != "page" for artifact in artifacts):
                    self._write_info()  # before the page, which reads it
        except ArtifactError as failure:
            raise self._told(failure.artifact, failure.error, len(artifacts)) from failure.error
        except OSError as error:
            raise OutputError(f"the run in {self.folder} cannot go on: {error}") from error
        self._remove_others(artifacts)
        stages: dict[str, State] = {name: "found" if done.found else "done" for name, done in self.done.items()}
        seconds = {name: done.entry.seconds for name, done in self.done.items()}
        page = self.folder / PAGE if "report" in self.done and (self.folder / PAGE).is_file() else None
        if sweeps:
            return Ran(self.folder, None, stages, seconds, page, self._swept())
        return Ran(self.folder, model_places(self.work)[-1], stages, seconds, page)

    def _swept(self) -> Swept:
        """What the sweep came to; what may succeed the next time (it lacked memory, say) is forgotten."""
        scores = [done for done in self.done.values() if done.artifact.kind == "scores"]
        swept = swept_of(self.work, [done.entry.key for done in scores])
        failed = {failure.name for failure in swept.failures if not failure.lasting}
        if failed:
            for done in self.done.values():
                variant = done.artifact.arguments.get("variant")
                if variant is None or variant.name in failed:
                    self.work.store.remove(done.entry)
        return replace(swept, done=sum(not done.found for done in scores), found=sum(done.found for done in scores))

    def _check_out(self) -> None:
        """Refuse, before any work, to replace a model elsewhere that is not this run's own."""
        out = self.work.recipe.out
        if out is not None:
            inputs = input_paths(self.work.recipe)
            check_target(Path(out), force=self._may_replace(model_places(self.work)[-1]), inputs=inputs)

    def _may_replace(self, target: Path) -> bool:
        """Whether a model may take the place of what is there: of a model of this run it may."""
        store = self.work.store
        models = (store.content(entry.key) for entry in store.entries() if entry.kind == "model")
        return self.force or self.folder in target.parents or any(is_same_model(model, target) for model in models)

    def _publish(self, done: Done) -> None:
        """Put a result where users look for it."""
        artifact, content = done.artifact, self.work.store.content(done.artifact.key)
        if artifact.kind == "model":
            target = dict(zip(("merge", "align"), model_places(self.work), strict=False))[artifact.name]
            replaced = self._may_replace(target)
            place_model(content, target, replaced=replaced, inputs=input_paths(self.work.recipe))
        elif artifact.kind == "kept":
            place_model(content, self.folder / MERGES / artifact.name.partition(" ")[2], replaced=True, inputs=())
        elif artifact.kind == "files":
            place_files(content, self.folder, kind=self.kind)
        elif artifact.kind == "page":
            place_page(content, self.folder)
        if artifact.name == "evaluate":
            place_scores(model_places(self.work)[-1], read_records(content / RECORDS))

    def _write_info(self) -> None:
        """Say how the run was made; where nothing is new, what was said before stands."""
        path, entries = self.folder / INFO, [done.entry for done in self.done.values()]
        info = RunInfo(
            command=self.command,
            recipe=self.work.text,
            started=f"{self.started:%Y-%m-%dT%H:%M:%SZ}",
            seconds={entry.name: round(entry.seconds, 3) for entry in entries},
            memory=max(entry.memory for entry in entries),
            machine=machine(),
            versions=versions(),
        )
        if self.kind == "sweep":
            scores = [entry for entry in entries if entry.kind == "scores"]
            seconds = {"scores": round(sum(entry.seconds for entry in entries if entry.kind != "files"), 3)}
            facts = facts_of(self.work, [entry.key for entry in scores])
            info = replace(info, seconds=seconds, manifests=tuple(facts))
        else:
            places = model_places(self.work)[: len([entry for entry in entries if entry.kind == "model"])]
            info = replace(info, manifests=tuple(_relative(place, self.folder) for place in places))
        with suppress(OrthomergeError):  # there is none, or it is damaged
            before = read_info(path)
            if (before.recipe, before.seconds, before.manifests) == (info.recipe, info.seconds, info.manifests):
                return
        claim(self.folder, [INFO])
        write_info(path, info)

    def _remove_others(self, artifacts: Iterable[Artifact]) -> None:
        """Remove results that the recipe does not ask for, from the store and from the run folder."""
        store, keys = self.work.store, {artifact.key for artifact in artifacts}
        files = (entry for entry in store.entries() if entry.key in keys and entry.kind == "files")
        kept = {name for entry in files for name in own_names(store.content(entry.key))}
        pages = any(done.artifact.kind == "page" for done in self.done.values())
        for entry in [entry for entry in store.entries() if entry.key not in keys]:
            content = store.content(entry.key)
            if entry.kind == "files":
                drop(self.folder, own_names(content) - kept)
            elif entry.kind == "page" and not pages:
                remove_page(content, self.folder)
            elif entry.kind == "kept" and entry.name not in self.done:
                remove_model(content, self.folder / MERGES / entry.name.partition(" ")[2])
            store.remove(entry)

    def _told(self, artifact: Artifact, error: Exception, count: int) -> OrthomergeError:
        """An error that says what is kept and how to go on."""
        place = len(self.done) + 1
        kept = ", ".join(name for name, done in self.done.items() if done.artifact.kind != "scores")
        what = error if isinstance(error, OrthomergeError) else f"cannot write to {self.folder}: {error}"
        message = (
            f"stage {place} of {count}, {artifact.name!r}, failed: {what}\n"
            + (f"What was done before is kept in {self.folder}: {kept}. " if kept else "")
            + f"Put it right and run the same command again{', without --force' if self.force and kept else ''}"
            + (f": it goes on with {artifact.name!r}." if kept else ".")
        )
        return type(error)(message) if isinstance(error, OrthomergeError) else OutputError(message)


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(os.path.abspath(path), os.path.abspath(folder))).as_posix()
