"""A suite: base, experts and tasks under one name, in one folder, built once and found again.

FOLDER/base/            the pre-trained encoder
FOLDER/experts/TASK/    fine-tuned classifiers, in stock format
FOLDER/mtl/TASK/        one encoder trained on all tasks at once, with each task's head
FOLDER/models/NAME/     whatever is evaluated, as outputs of `orthomerge merge`
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from orthomerge.checkpoints.publish import MANIFEST
from orthomerge.errors import CheckpointError, RecipeError, nearest
from orthomerge.evaluation.evaluate import Subject
from orthomerge.manifest import read_manifest
from orthomerge.pipeline import merge
from orthomerge.planning import make_plan
from orthomerge.recipe import Expert, Fit, Recipe

if TYPE_CHECKING:
    from orthomerge.checkpoints.checkpoint import Checkpoint
    from orthomerge.checkpoints.lora import Adapter
    from orthomerge.data.processing import Processor
    from orthomerge.data.task import Split, Task
    from orthomerge.planning import Job
    from orthomerge.records import Access

__all__ = ["Say", "Suite", "output_name", "suite_root"]

Say = Callable[[str], None]


def suite_root() -> Path:
    """Where suites are kept: `suites` in $ORTHOMERGE_CACHE, or in `~/.cache/orthomerge`."""
    return Path(os.environ.get("ORTHOMERGE_CACHE") or "~/.cache/orthomerge").expanduser() / "suites"


def output_name(method: str, parameters: Mapping[str, Any]) -> str:
    """What the folder of a merge is called."""
    options = "".join(f"-{key}={value}" for key, value in sorted(parameters.items()))
    return f"{method}{options}".replace("/", "_")


@dataclass(frozen=True)
class Suite:
    """A built suite.

    An expert is a folder in stock format, or an `Expert` that says what its file does not; the base then says the rest.
    `options` are those of every recipe, for example `pooling`.
    """

    name: str
    folder: Path
    tasks: Mapping[str, Task]
    processor: Processor
    experts: Mapping[str, Path | Expert]
    mtl: Mapping[str, Path] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def base(self) -> Path:
        return self.folder / "base"

    def recipe(self, method: str, parameters: Mapping[str, Any] | None = None, **more: Any) -> Recipe:
        """The merge of all experts by a method."""
        return Recipe(
            experts={task: _plain(expert) for task, expert in self.experts.items()},
            base=str(self.base),
            method=method,
            parameters=dict(parameters or {}),
            **{**self.options, **more},
        )

    def merged(self, method: str, parameters: Mapping[str, Any] | None = None) -> Subject:
        """The merge of all experts, made now unless it was before."""
        given = dict(parameters or {})
        out = self._made(output_name(method, given), self.recipe(method, given))
        return Subject(method, dict.fromkeys(self.tasks, out), given)

    def fitted(
        self,
        method: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        split: Split = "train",
        device: str = "auto",
        name: str | None = None,
    ) -> Subject:
        """A merge fitted to the unlabelled inputs of one split of all tasks, made now; `name`: in tables."""
        from orthomerge.features.cache import FeatureCache
        from orthomerge.fitted import merge_fitted

        given = dict(parameters or {})
        fit = Fit(cast("dict[str, str]", dict(self.tasks)), split=split, device=device, resume=False)
        out = self.folder / "models" / f"{output_name(method, given)}-{split}"
        merge_fitted(
            self.recipe(method, given, fit=fit),
            to=out,
            force=True,
            processor=self.processor,
            cache=FeatureCache(self.folder / "features"),
        )
        access: Access = "transductive" if split == "test" else "inductive"
        return Subject(name or method, dict.fromkeys(self.tasks, out), given, access=access)

    def references(self) -> dict[str, Subject]:
        """What every table starts with: the base under the experts' heads, the experts, and multi-task training."""
        untuned = self._made("base", self.recipe("task_arithmetic", {"scale": 0.0}))
        found = {
            "base": Subject("base", dict.fromkeys(self.tasks, untuned)),
            "expert": Subject("expert", self.alone("expert", self.experts)),
        }
        if self.mtl:
            found["mtl"] = Subject("mtl", self.alone("mtl", self.mtl), access="data-free")
        return found

    def alone(self, kind: str, classifiers: Mapping[str, Path | Expert]) -> dict[str, Path]:
        """Single classifiers as outputs, weights unchanged: the average of one."""
        return {
            task: self._made(
                f"{kind}-{task}",
                Recipe(
                    experts={task: _plain(given)},
                    base=str(self.base) if isinstance(given, Expert) else None,
                    method="average",
                    **self.options,
                ),
            )
            for task, given in classifiers.items()
        }

    def task(self, name: str) -> Task:
        if name not in self.tasks:
            raise RecipeError(f"suite {self.name!r} has no task {name!r}; {nearest(name, self.tasks)}")
        return self.tasks[name]

    @cached_property
    def _digests(self) -> dict[tuple[Path, int, int, int], str]:
        """Hashes of input files by path, size and times, so that every file is read once."""
        return {}

    def _made(self, name: str, recipe: Recipe) -> Path:
        """An output folder that was made of what the recipe names now: found, or made (again) where it was not."""
        out = self.folder / "models" / name
        if not (out / MANIFEST).is_file():
            merge(recipe, out=out)
        elif not self._is_current(out, make_plan(recipe).check()):
            merge(recipe, out=out, force=True)
        return out

    def _is_current(self, out: Path, job: Job) -> bool:
        """Whether the manifest speaks of these inputs, byte by byte, and of this method, pooling, dtype and labels."""
        try:
            manifest = read_manifest(out)
        except CheckpointError:  # of another version, or damaged
            return False
        now = {
            "method": {"name": job.recipe.method, "parameters": vars(job.method)},
            "seed": job.recipe.seed,
            "pooling": job.pooling,
            "dtype": job.recipe.dtype,
            "inputs": {
                "base": self._files(job.base),
                "experts": {task: self._files(expert.source) for task, expert in job.experts.items()},
            },
            "heads": {task: list(expert.labels) for task, expert in job.experts.items()},
        }
        return bool(json.loads(json.dumps(now)) == _told(manifest))

    def _files(self, source: Checkpoint | Adapter) -> list[str]:
        found = []
        for file in source.files:
            status = file.path.stat()
            key = (file.path, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            if key not in self._digests:
                self._digests[key] = file.digest()
            found.append(self._digests[key])
        return found


def _told(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a manifest says of what an output was made of, in the form of `Suite._is_current`."""
    try:
        inputs = manifest["inputs"]
        return {
            "method": manifest["method"],
            "seed": manifest["seed"],
            "pooling": manifest["pooling"],
            "dtype": manifest["encoder"]["dtype"],
            "inputs": {
                "base": [file["hash"] for file in inputs["base"]["files"]],
                "experts": {
                    task: [file["hash"] for file in given["files"]] for task, given in inputs["experts"].items()
                },
            },
            "heads": {task: head["labels"] for task, head in manifest["heads"].items()},
        }
    except (KeyError, TypeError, AttributeError):  # it does not say
        return None


def _plain(expert: Path | Expert) -> Expert | str:
    return expert if isinstance(expert, Expert) else str(expert)
