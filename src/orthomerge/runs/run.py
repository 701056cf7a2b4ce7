"""Carry out a recipe with all its sections in one run folder.

The folder holds the files of every result, `run.json` (command, recipe, seconds, memory, machine, versions) and the
store of results by content (`store.py`). Results whose inputs have not changed are reused, so a run that was killed or
failed continues when it is repeated. Results that the recipe no longer asks for are removed at the end.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from orthomerge.core.device import fixed_threads
from orthomerge.core.errors import CheckpointError, OrthomergeError, OutputError, RecipeError
from orthomerge.core.progress import Progress
from orthomerge.core.version import VERSION
from orthomerge.evaluation.records import INFO, RunInfo, read_info, read_records, write_info
from orthomerge.evaluation.scores import DERIVED, RECORDS, drop_stale
from orthomerge.files.documents import write_json
from orthomerge.files.folders import LOCAL, RUN, claim, drop, names_in
from orthomerge.files.publish import check_target, publish
from orthomerge.files.raw_file import RawFile
from orthomerge.files.replacing import remove_file, replace_file
from orthomerge.models.manifest import README, local_places, read_local, read_manifest
from orthomerge.models.writing import link_folder, versions
from orthomerge.runs.driver import Artifact, ArtifactError, Done, Engine, On, drive, engine_of
from orthomerge.runs.models import check_recipe, input_paths
from orthomerge.runs.recipe import Recipe, read_recipe
from orthomerge.runs.steps import PAGE, model_places, place_scores, run_artifacts
from orthomerge.runs.sweep import MERGES, Swept, check_space, results_of, sweep_artifacts, swept_of
from orthomerge.runs.variants import check_sweep
from orthomerge.runs.work import MODEL, STORE, Work


@dataclass(frozen=True)
class Ran:
    """Outcome of a run. `out`: the last model, None after a sweep. `stages`: whether each was done or found."""

    folder: Path
    out: Path | None
    stages: dict[str, Literal["done", "found"]]
    seconds: dict[str, float]
    page: Path | None = None
    swept: Swept | None = None

    def as_dict(self) -> dict[str, Any]:
        stages = {
            name: {"state": state, "seconds": round(self.seconds[name], 3)} for name, state in self.stages.items()
        }
        page = None if self.page is None else str(self.page)
        document: dict[str, Any] = {"run": str(self.folder), "report": page, "stages": stages}
        if self.out is not None:
            document |= {"out": str(self.out), "evaluation": read_manifest(self.out).get("evaluation")}
        return document if self.swept is None else document | self.swept.as_dict()


def run(
    recipe: Recipe | str | Path,
    *,
    out: str | Path | None = None,
    on: On = None,
    force: bool = False,
    watch: Progress | None = None,
    command: str = "",
) -> Ran:
    """Carry out a recipe in the run folder `out`, by default `runs/NAME` for a file NAME.yaml.

    `on`: where results are computed: `process:N`, `ray`, `ray:N`, `module:function`, or an `Executor`; by default in
    this process. `force`: compute everything again, and replace an earlier output at the recipe's `out`. `command`: the
    command line, for the report.
    """
    import torch

    engine, text = engine_of(on), ""
    if not isinstance(recipe, Recipe):
        path = Path(recipe)
        recipe, text, out = read_recipe(path), path.read_text(encoding="utf-8"), out or Path("runs") / path.stem
    if out is None:
        raise RecipeError("a recipe made in Python needs a run folder: run(recipe, out=...)")
    folder = Path(out).expanduser()
    with nullcontext() if recipe.sweep is None else fixed_threads():
        if recipe.searches_scale and recipe.sweep is None:
            raise RecipeError(
                "'scale: auto' is chosen by `orthomerge merge --set scale=auto --data TASK=PATH`; give the number that "
                "it chooses, or use a fitted method"
            )
        experts = check_recipe(recipe) if recipe.sweep is None else check_sweep(recipe)[1]
        _check_folder(folder, force=force)
        text = text or recipe.text()
        if on not in (None, "serial"):
            recipe, folder = recipe.absolute(), folder.absolute()
        work = Work(recipe, text, folder, torch.get_num_threads(), watch or Progress(), experts)
        return _Run(work, command, force).go(engine)


def _check_folder(run: Path, *, force: bool) -> None:
    """Refuse a folder with other files in it, and links that lead out of it."""
    try:
        is_empty = not run.is_dir() or all(path.name == RUN for path in run.iterdir())
        if not is_empty and not (run / STORE).is_dir() and not force:
            raise OutputError(
                f"{run} is not empty and was not made by `orthomerge run` (it has no {STORE}); "
                "give another --out, or --force to write into it"
            )
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write the run to {run}: {error.strerror}; give another --out") from error
    for name in ("models", MERGES, STORE):
        if (run / name).is_symlink():
            raise OutputError(f"{run / name} is a link, and nothing is written through links; move it away")


@dataclass(frozen=True)
class _Run:
    """A run in progress. `done`: the artifacts in the store, by name."""

    work: Work
    command: str
    force: bool
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    done: dict[str, Done] = field(default_factory=dict)

    def go(self, engine: Engine) -> Ran:
        """Make every artifact, publish each when it is stored, and remove results that the recipe does not ask for."""
        work, recipe, folder = self.work, self.work.recipe, self.work.run
        claim(folder, [], kind="run" if recipe.sweep is None else "sweep")
        artifacts = list((run_artifacts if recipe.sweep is None else sweep_artifacts)(work))
        if recipe.out is not None:  # before any work
            check_target(Path(recipe.out), force=self._may_replace(Path(recipe.out)), inputs=input_paths(recipe))
        for entry in list(work.store.entries()) if self.force else []:
            work.store.remove(entry)
        if recipe.sweep is not None:
            work.progress.stage(check_space(work, artifacts), None)
        names = {artifact.name for artifact in artifacts} - {"report"}
        try:
            for done in drive(artifacts, work, engine):
                self.done[done.artifact.name] = done
                self._publish(done)
                if done.artifact.name != "report" and names <= self.done.keys():
                    self._write_info()  # before the page, which reads it
        except ArtifactError as failure:
            raise self._failure(failure.artifact, failure.error, artifacts) from failure.error
        except OSError as error:
            raise OutputError(f"the run in {folder} cannot continue: {error}") from error
        self._remove_others(artifacts)
        ordered = {artifact.name: self.done[artifact.name] for artifact in artifacts}
        return Ran(
            folder=folder,
            out=model_places(work)[-1] if recipe.sweep is None else None,
            stages={name: "found" if done.found else "done" for name, done in ordered.items()},
            seconds={name: done.entry.seconds for name, done in ordered.items()},
            page=folder / PAGE if "report" in ordered and (folder / PAGE).is_file() else None,
            swept=None if recipe.sweep is None else self._swept(),
        )

    def _scores(self) -> list[Done]:
        return [done for done in self.done.values() if "variant" in done.artifact.options]

    def _swept(self) -> Swept:
        """Return the outcome of the sweep; results with failures are removed, so that the next run makes them again."""
        scores = self._scores()
        swept = swept_of(self.work, results_of(self.work, [done.entry.key for done in scores]))
        failed = {failure.name for failure in swept.failures}
        for done in scores:
            if done.artifact.options["variant"].name in failed:
                self.work.store.remove(done.entry)
        return replace(swept, done=sum(not done.found for done in scores), found=sum(done.found for done in scores))

    def _may_replace(self, target: Path) -> bool:
        """Return whether a model may replace its target: with `force`, or if the target is a model of this run."""
        store = self.work.store
        models = (store.content(entry.key) / MODEL for entry in store.entries())
        return self.force or self.work.run in target.parents or any(_is_same_model(model, target) for model in models)

    def _publish(self, done: Done) -> None:
        artifact, content = done.artifact, self.work.store.content(done.artifact.key)
        if artifact.model is not None and (content / MODEL).is_dir():  # a merge of a sweep may have failed
            force, inputs = self._may_replace(artifact.model), input_paths(self.work.recipe)
            _place_model(content / MODEL, artifact.model, force=force, inputs=inputs)
        if artifact.files:
            _place_files(content, self.work.run)
        if artifact.name == "evaluate":
            title = self.work.model(artifact.needs[-1]).title
            place_scores(model_places(self.work)[-1], title, read_records(content / RECORDS))

    def _write_info(self) -> None:
        """Write run.json, unless recipe, seconds and manifests are unchanged."""
        path, entries = self.work.run / INFO, [done.entry for done in self.done.values()]
        manifests: tuple[str | dict[str, Any], ...]
        if self.work.recipe.sweep is None:
            seconds = {entry.name: round(entry.seconds, 3) for entry in entries}
            manifests = tuple(os.path.relpath(place, self.work.run) for place in model_places(self.work))
        else:
            scores = [done.entry for done in self._scores()]
            seconds = {"scores": round(sum(entry.seconds for entry in scores), 3)}
            results = results_of(self.work, [entry.key for entry in scores])
            manifests = tuple(result.facts for result in results if result.facts)
        with suppress(OrthomergeError):  # missing or damaged
            before = read_info(path)
            if (before.recipe, before.seconds, before.manifests) == (self.work.text, seconds, manifests):
                return
        claim(self.work.run, [INFO])
        facts = RunInfo(
            command=self.command,
            recipe=self.work.text,
            started=f"{self.started:%Y-%m-%dT%H:%M:%SZ}",
            seconds=seconds,
            memory=max(entry.memory for entry in entries),
            machine=_machine(),
            versions={"orthomerge": VERSION, **versions(), "transformers": version("transformers")},
            manifests=manifests,
        )
        write_info(path, facts)

    def _remove_others(self, artifacts: Sequence[Artifact]) -> None:
        """Remove results that the recipe no longer asks for, and their files from the run folder."""
        store, keys = self.work.store, {artifact.key for artifact in artifacts}
        kept = {name for artifact in artifacts if artifact.files for name in _own_names(store.content(artifact.key))}
        for entry in [entry for entry in store.entries() if entry.key not in keys]:
            drop(self.work.run, _own_names(store.content(entry.key)) - kept)
            store.remove(entry)

    def _failure(self, artifact: Artifact, error: Exception, artifacts: Sequence[Artifact]) -> OrthomergeError:
        folder, kept = self.work.run, ", ".join(done.artifact.name for done in self.done.values())
        reason = error if isinstance(error, OrthomergeError) else f"cannot write to {folder}: {error}"
        stage = f"stage {artifacts.index(artifact) + 1} of {len(artifacts)}, {artifact.name!r}, failed: {reason}"
        again = "Correct this and run the same command again"
        if kept:
            flag = ", without --force" if self.force else ""
            again = f"Earlier stages are kept in {folder}: {kept}. {again}{flag}; it continues with {artifact.name!r}"
        return (type(error) if isinstance(error, OrthomergeError) else OutputError)(f"{stage}\n{again}.")


def _machine() -> str:
    """Describe cores, memory, system and, if torch finds one, the GPU."""
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.platform()}{gpu}"


def _place_model(content: Path, target: Path, *, force: bool, inputs: Iterable[Path]) -> None:
    """Link a model of the store to `target`. `force`: replace a model that is there."""
    if _is_same_model(content, target):
        return
    with publish(target, force=force, inputs=inputs) as folder:
        link_folder(content, folder, without={LOCAL})
        write_json(folder / LOCAL, local_places(read_local(content), target))


def _is_same_model(content: Path, target: Path) -> bool:
    """Return whether a folder holds a model of the store; the cards may differ."""
    try:
        published, stored = ({**read_manifest(folder)["files"], README: None} for folder in (target, content))
        names = stored.keys() - {README}
        return published == stored and all(_is_same(content / name, target / name) for name in names)
    except (OSError, CheckpointError):
        return False


def _place_files(content: Path, run: Path) -> None:
    """Copy files of the store into the run folder: predictions, then records, then files derived from them."""
    names = sorted(_own_names(content), key=lambda name: (name in DERIVED, name == RECORDS, name))
    claim(run, names)
    if not all(_is_same(content / name, run / name) for name in names):
        for name in set(DERIVED) & set(names):
            remove_file(run / name)
        for name in names:
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            replace_file(run / name, (content / name).read_bytes())
    if RECORDS in names:
        drop_stale(run, read_records(content / RECORDS))


def _own_names(content: Path) -> set[str]:
    """Return the names that the files of a result have in the run folder."""
    return {name for name in names_in(content) if name != RUN and not name.endswith("/")}


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other) or RawFile(one).digest() == RawFile(other).digest()
    except (OSError, OrthomergeError):
        return False
