"""Merge fine-tuned classifiers into one model, heads included.

Names are imported when first used, so that `import orthomerge` and `orthomerge --help` are instant.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orthomerge.alignment.align import align as align
    from orthomerge.analysis.diagnosis import Diagnosis as Diagnosis
    from orthomerge.api.analogy import analogy as analogy
    from orthomerge.api.diagnose import diagnose as diagnose
    from orthomerge.api.evaluate import evaluate as evaluate
    from orthomerge.api.export import export as export
    from orthomerge.api.finetune import finetune as finetune
    from orthomerge.api.inspect import inspect as inspect
    from orthomerge.api.list import list as list  # noqa: A004 - as open
    from orthomerge.api.load import load as load
    from orthomerge.api.merge import merge as merge
    from orthomerge.api.negate import negate as negate
    from orthomerge.api.open import open as open  # noqa: A004 - the verb of the library, used as om.open
    from orthomerge.api.push import push as push
    from orthomerge.core.errors import OrthomergeError as OrthomergeError
    from orthomerge.data.reading import read_task
    from orthomerge.data.task import Task as Task
    from orthomerge.evaluation.scores import Scores as Scores
    from orthomerge.merging.vectors import TaskVector as TaskVector
    from orthomerge.models.experts import Experts as Experts
    from orthomerge.models.heads import Prediction as Prediction
    from orthomerge.models.model import Model as Model
    from orthomerge.reporting.report import report as report
    from orthomerge.runs.recipe import Recipe as Recipe
    from orthomerge.runs.recipe import read_recipe as read_recipe
    from orthomerge.runs.run import run as run

    read_data = read_task

_HOMES = {
    "Diagnosis": "analysis.diagnosis",
    "Experts": "models.experts",
    "Model": "models.model",
    "OrthomergeError": "core.errors",
    "Prediction": "models.heads",
    "Recipe": "runs.recipe",
    "Scores": "evaluation.scores",
    "Task": "data.task",
    "TaskVector": "merging.vectors",
    "align": "alignment.align",
    "analogy": "api.analogy",
    "diagnose": "api.diagnose",
    "evaluate": "api.evaluate",
    "export": "api.export",
    "finetune": "api.finetune",
    "inspect": "api.inspect",
    "list": "api.list",
    "load": "api.load",
    "merge": "api.merge",
    "negate": "api.negate",
    "open": "api.open",
    "push": "api.push",
    "read_data": "data.reading:read_task",
    "read_recipe": "runs.recipe",
    "report": "reporting.report",
    "run": "runs.run",
    "__version__": "core.version:VERSION",
}

__all__ = tuple(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'orthomerge' has no attribute {name!r}")
    home, _, own = _HOMES[name].partition(":")
    return getattr(import_module(f"orthomerge.{home}"), own or name)


def __dir__() -> Sequence[str]:
    return sorted(__all__)
