"""State that the artifacts of a run share (recipe, run folder, store, opened experts), and keys of results.

A key is a hash of everything that a result depends on and of nothing else: the content of inputs, but not the paths and
times of files, and not where or how fast the result is computed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from orthomerge.core.errors import OutputError, RecipeError
from orthomerge.core.progress import Progress
from orthomerge.core.version import VERSION
from orthomerge.data.reading import ColumnSource, labelled_tasks
from orthomerge.data.task import Task
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.files.checkpoint import Checkpoint
from orthomerge.files.folders import names_in
from orthomerge.files.lora import Adapter
from orthomerge.files.raw_file import RawFile
from orthomerge.models.encoding import Encoding
from orthomerge.models.experts import Experts
from orthomerge.models.manifest import README
from orthomerge.models.model import Model
from orthomerge.models.processors import COMPANIONS
from orthomerge.models.saved import read_model
from orthomerge.runs.recipe import Recipe
from orthomerge.runs.sections import Align, Evaluate, Fit, Report
from orthomerge.runs.store import Entry, Store

STORE = ".store"
MODEL = "model"  # folder of the model in a result
# Files of a checkpoint that a merge reads, beside the weights.
_DOCUMENTS = ("config.json", "adapter_config.json", README, *COMPANIONS)
_COMPUTE = ("device", "batch", "precision", "resume", "save_every")  # options that do not change results


@dataclass(frozen=True, eq=False)
class Work:
    """A run in progress; another process gets the plain fields and opens everything itself.

    `text`: the recipe as it was written. `thread_count`: of torch. `opened`: the experts, if they are already open.
    """

    recipe: Recipe
    text: str
    run: Path
    thread_count: int
    progress: Progress = field(default_factory=Progress)
    opened: Experts | None = None
    _models: dict[str, Model] = field(default_factory=dict, init=False)

    def __getstate__(self) -> dict[str, Any]:
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**plain, "progress": Progress(), "opened": None, "_models": {}}

    @property
    def title(self) -> str | None:
        return self.recipe.report.title if isinstance(self.recipe.report, Report) else None

    @cached_property
    def store(self) -> Store:
        return Store(self.run / STORE)

    @cached_property
    def experts(self) -> Experts:
        return self.opened or Experts(self.recipe.opening).check()

    @cached_property
    def experts_key(self) -> str:
        """Hash of base and experts, and of the options of opening them."""
        digests = {task: _checkpoint_digest(opened) for task, opened in self.experts.checkpoints().items()}
        base = digests[""] if self.experts.has_base else None
        experts = [(task, {**asdict(expert), "path": digests[task]}) for task, expert in self.recipe.tasks.items()]
        return key_of({**vars(self.recipe.opening), "base": base, "experts": experts})

    @property
    def section(self) -> Evaluate:
        """Section `evaluate`, or an error if the recipe has none."""
        if self.recipe.evaluate is None:
            raise RecipeError("the recipe has no section 'evaluate'; add one with the data of the tasks")
        return self.recipe.evaluate

    @cached_property
    def encoded(self) -> EncodedTasks:
        """Tasks of `evaluate`, with the experts as teachers."""
        labels = {task: head.labels for task, head in self.experts.heads.items()}
        tasks = labelled_tasks(self.section.data, labels, self.experts.family.modality)
        teachers = {task: self.experts.teacher(task) for task in tasks}
        how = Encoding(device=self.section.device, batch=self.section.batch)
        return EncodedTasks(tasks, teachers, how, self.progress)

    def entry(self, key: str) -> Entry:
        """Return a result, which must be in the store."""
        entry = self.store.get(key)
        if entry is None:
            raise OutputError(f"{self.store.content(key)} is missing or was changed; run the same command again")
        return entry

    def folder(self, key: str) -> Path:
        return self.store.content(self.entry(key).key)

    def model(self, key: str) -> Model:
        """Return the model of a result with its experts; it is read once per process."""
        if key not in self._models:
            model = read_model(self.folder(key) / MODEL)
            self._models[key] = replace(model, origin=replace(model.origin, experts=self.experts))
        return self._models[key]


def key_of(*parts: Any) -> str:
    """Hash plain data together with the versions of orthomerge and torch."""
    content = [VERSION, version("torch"), *parts]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def merge_key(recipe: Recipe, experts_key: str) -> str:
    """Return the key of the merge or fit of a recipe, without alignment."""
    options = [getattr(recipe, name) for name in ("method", "parameters", "vector", "dtype", "seed", "max_shard_size")]
    return key_of(options, None if recipe.fit is None else section_content(recipe.fit), experts_key)


def section_content(section: Fit | Align | Evaluate) -> dict[str, Any]:
    """Return a section with digests of its data, without options that do not change results."""
    content = {name: value for name, value in vars(section).items() if name not in ("data", *_COMPUTE)}
    return {**content, "data": [(task, source_digest(source)) for task, source in section.data.items()]}


def source_digest(source: str | Task) -> str:
    """Hash a task's data: a file, a folder or a task in memory; for a dataset of the Hub, return its name."""
    if isinstance(source, ColumnSource):
        return key_of(source_digest(str(source)), source.text, source.label)
    if not isinstance(source, str):
        parts = sorted(source.splits.items())
        labels = {split: None if part.labels is None else part.labels.tolist() for split, part in parts}
        return key_of(source.labels, labels, {split: part.digest() for split, part in parts})
    path = Path(source).expanduser()
    if path.is_file():
        return RawFile(path).digest()
    if not path.is_dir():
        return source
    return key_of([(name, RawFile(path / name).digest()) for name in sorted(names_in(path)) if (path / name).is_file()])


def _checkpoint_digest(opened: Checkpoint | Adapter) -> str:
    """Hash a model, adapter or file of weights with the documents beside it."""
    path = opened.path
    beside = [path / name for name in _DOCUMENTS if path.is_dir() and (path / name).is_file()]
    weights = [(file.path.name, file.digest()) for file in opened.files]
    return key_of(path.name, opened.revision, weights, [(file.name, RawFile(file).digest()) for file in beside])
